// Assembles the page: events update the store, and the parts of the page show its new state.

import { KeyFinder } from "./key_finder.js";
import { nodeColor, onTheme, stateColor, theme, valueColor } from "./palette.js";
import { Panels } from "./panels.js";
import { ask, follow, whenLoggedOut } from "./server.js";
import { SlotMap } from "./slot_map.js";
import { ADDING, byName, EPOCH, IN_SYNC, nameOf, PRIMARY, REASON, REMOVING, REPLICAS, STATE_WORDS, stateOf, Store, WANTED } from "./store.js";
import { bytes, count, el, milliseconds, plural, rate, setText, state } from "./text.js";
import { TimeTravel } from "./time_travel.js";

const MODES = {
  leader: "Leader", state: "State", load: "Load", size: "Size", lag: "Lag",
};
const SAYS = {
  leader: "Its colour says which node leads it: reads and writes go there.",
  state: "Its colour says how it is.",
  load: "The stronger its colour, the more rows are read and written in it.",
  size: "The stronger its colour, the more bytes a copy of it holds.",
  lag: "The stronger its colour, the further the nodes of its copies are behind.",
};
const at = (id) => document.getElementById(id);
const store = new Store();
const map = new SlotMap(at("map"), showCell);
const past = new TimeTravel(store, showTable);
const finder = new KeyFinder(store, keyspaceName, (places) => { map.marks = places; map.drawAll(); });
const panels = new Panels(store);
let shown = null;            // the table on the map: the newest one, or one of the past

// --- the map ---------------------------------------------------------------------------------------

function keyspaceName() { return at("keyspace").value || "default"; }

function keyspace() {
  const all = shown?.keyspaces ?? [];
  return all.find((one) => one.name === keyspaceName()) ?? all[0];
}

function showTable(table, partitions = []) {
  shown = table ?? store.table;
  map.outlined = new Set(table ? partitions : []);
  for (const input of document.querySelectorAll("#modes input")) input.disabled = Boolean(table) && !["leader", "state"].includes(input.value);
  if (table && !["leader", "state"].includes(map.mode)) chooseMode("leader");
  const of = keyspace();
  if (of) map.show(shown, of.base, of.partition_count);
  drawLegend();
  showCell(map.cursor, null, map.pinned);
}

function chooseMode(mode) {
  map.mode = mode;
  document.querySelector(`#modes input[value=${mode}]`).checked = true;
  setText(at("map-says"), SAYS[mode]);
  drawValues();
  map.drawAll();
}

function lagOf(row) {
  const lags = row[REPLICAS].filter((n) => n !== row[PRIMARY]).map((n) => store.nodeOf(nameOf(shown, n))?.lag_ms ?? 0);
  return Math.max(0, ...lags);
}

const VALUES = {
  load: { of: (p) => (store.rates?.reads?.[p] ?? 0) + (store.rates?.writes?.[p] ?? 0), shown: (v) => `${rate(v)} rows/s` },
  size: { of: (p) => store.sizes?.bytes?.[p] ?? 0, shown: bytes },
  lag: { of: (p, row) => lagOf(row ?? shown.rows[p]), shown: milliseconds },
};

function drawValues() {
  const value = VALUES[map.mode], of = keyspace();
  if (value && of && shown) {
    map.valueOf = value.of;
    map.most = 0;
    for (let p = of.base; p < of.base + of.partition_count; p += 1) map.most = Math.max(map.most, value.of(p, shown.rows[p]) || 0);
  }
  drawLegend();
}

function drawLegend() {
  const of = keyspace(), legend = at("legend");
  if (!of || !shown) return;
  const rows = shown.rows.slice(of.base, of.base + of.partition_count).filter(Boolean);
  const items = [];
  if (map.mode === "leader") {
    const led = new Map();
    for (const row of rows) led.set(row[PRIMARY], (led.get(row[PRIMARY]) ?? 0) + 1);
    const nodes = [...shown.nodes.values()].filter((node) => node.status !== "left" || led.has(node.number));
    for (const node of nodes.sort((a, b) => byName(a.id, b.id))) items.push(["node", node.number, node.id, led.get(node.number) ?? 0, nodeColor(shown.places.get(node.number))]);
    if (led.has(0)) items.push(["item", 0, "nobody", led.get(0), stateColor("offline")]);
  } else if (map.mode === "state") {
    const states = new Map();
    for (const row of rows) states.set(stateOf(row), (states.get(stateOf(row)) ?? 0) + 1);
    for (const name of ["online", "short", "moving", "starting", "offline"]) {
      if (states.has(name) || name === "online") items.push(["item", 0, STATE_WORDS[name], states.get(name) ?? 0, stateColor(name)]);
    }
  } else {
    items.push(["ramp", 0, VALUES[map.mode].shown(map.most), 0, theme()]);
  }
  const plain = JSON.stringify([items, map.chosenNode]);
  if (legend.dataset.shown === plain) return;
  legend.dataset.shown = plain;
  const focused = document.activeElement?.closest?.("#legend button")?.dataset.node;
  legend.replaceChildren(...items.flatMap(legendItem));
  if (focused) legend.querySelector(`button[data-node="${focused}"]`)?.focus();
}

function legendItem([kind, number, name, times, color]) {
  if (kind === "ramp") {
    const ramp = el("span", { class: "ramp", "aria-hidden": "true" });
    ramp.style.background = `linear-gradient(90deg, ${[0, 0.02, 0.15, 0.5, 1].map((v) => valueColor(v * 1000, 1000)).join(", ")})`;
    return [el("span", {}, "0"), ramp, el("span", {}, name)];
  }
  const swatch = el("span", { class: "swatch", color, "aria-hidden": "true" });
  if (kind === "item") return [el("span", { class: "item" }, swatch, `${name} ${count(times)}`)];
  const chosen = map.chosenNode === number;
  return [el("button", { type: "button", "aria-pressed": String(chosen), "data-node": String(number), title: `Show only what ${name} has`,
    onclick: () => { map.chosenNode = chosen ? 0 : number; map.drawAll(); drawLegend(); } }, swatch, `${name} leads ${count(times)}`)];
}

function facts(partition) {
  const row = shown?.rows[partition];
  if (!row) return null;
  const name = (number) => nameOf(shown, number), names = (numbers) => numbers.map(name).join(", ");
  const of = keyspace(), now = !past.version, word = stateOf(row);
  const backups = row[REPLICAS].filter((n) => n !== row[PRIMARY]);
  const lacking = row[REPLICAS].filter((n) => !row[IN_SYNC].includes(n));
  const pairs = [
    ["State", STATE_WORDS[word] + (row[REASON] ? ` (${row[REASON]})` : "")],
    ["Leader", row[PRIMARY] ? name(row[PRIMARY]) : "nobody"],
    ["Copies on", backups.length ? names(backups) : "no other node"],
    ["In sync", lacking.length ? `${names(row[IN_SYNC])}; not yet: ${names(lacking)}` : "all"],
  ];
  if (row[ADDING].length) pairs.push(["Goes to", names(row[ADDING])]);
  if (row[REMOVING].length) pairs.push(["Leaves", names(row[REMOVING])]);
  if (row[WANTED]) pairs.push(["Will be led by", name(row[WANTED])]);
  if (now && store.rates) pairs.push(["Reads, writes", `${rate(store.rates.reads?.[partition] ?? 0)}/s, ${rate(store.rates.writes?.[partition] ?? 0)}/s`]);
  if (now && store.sizes) pairs.push(["A copy holds", `${plural(store.sizes.records?.[partition] ?? 0, "record")}, ${bytes(store.sizes.bytes?.[partition] ?? 0)}`]);
  if (now) pairs.push(["Copies behind by", milliseconds(lagOf(row))]);
  pairs.push(["Keyspace", of?.name ?? ""], ["Leader changes", `${count(Math.max(0, row[EPOCH] - 1))} so far`]);
  return pairs;
}

function showCell(partition, where, pinned) {
  const pairs = partition < 0 ? null : facts(partition), tip = at("tip");
  tip.hidden = !pairs || !where;
  if (pairs && where) {
    tip.replaceChildren(el("strong", {}, `Partition ${count(partition)}`), el("dl", {}, ...pairs.slice(0, 4).flatMap(([n, v]) => [el("dt", {}, n), el("dd", {}, v)])));
    const box = at("map").getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(where.x + 16, box.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${where.y + 18}px`;
  }
  const title = pairs ? `Partition ${count(partition)}` : "Partition";
  setText(at("cell-title"), title);
  const plain = JSON.stringify([pairs, pinned]);
  if (at("cell").dataset.shown === plain) return;
  at("cell").dataset.shown = plain;
  const none = el("p", { class: "quiet" }, "Point at a square, or go to it with the arrow keys. A click keeps it.");
  at("cell").replaceChildren(pairs ? el("dl", {}, ...pairs.flatMap(([n, v]) => [el("dt", {}, n), el("dd", {}, v)])) : none);
}

function drawKeyspaceChoice() {
  const names = store.table.keyspaces.map((one) => one.name), select = at("keyspace"), chosen = select.value;
  const plain = JSON.stringify(names);
  if (select.dataset.shown === plain) return;
  select.dataset.shown = plain;
  select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  select.value = names.includes(chosen) ? chosen : "default";
}

// --- events ----------------------------------------------------------------------------------------

store.addEventListener("table", (event) => {
  drawKeyspaceChoice();
  setText(at("cluster"), `cluster ${store.table.clusterId.slice(0, 8)}`);
  if (past.version) return;
  const of = keyspace(), same = shown && of && map.count === of.partition_count && map.first === of.base;
  if (event.detail.whole || !same) { showTable(null); return; }
  shown = store.table;
  map.update(shown, event.detail.changed);
  drawLegend();
  showCell(map.cursor, null, map.pinned);
});
for (const name of ["moment", "values"]) {
  store.addEventListener(name, () => {
    if (past.version || !shown) return;
    if (VALUES[map.mode]) { drawValues(); map.drawAll(); }
    if (map.pinned) showCell(map.cursor, null, true);
  });
}
onTheme(() => { at("legend").dataset.shown = ""; map.drawAll(); drawLegend(); if (store.moment) panels.draw(); finder.find(); });

for (const [mode, name] of Object.entries(MODES)) {
  at("modes").append(el("label", {}, el("input", { type: "radio", name: "mode", value: mode, checked: mode === "leader", onchange: () => chooseMode(mode) }), el("span", {}, name)));
}
chooseMode("leader");
at("keyspace").addEventListener("change", () => { showTable(past.version ? shown : null); finder.find(); });
at("theme").addEventListener("click", () => {
  const other = theme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = other;
  localStorage.setItem("theme", other);
  document.dispatchEvent(new Event("theme"));
});
if (localStorage.getItem("theme")) document.documentElement.dataset.theme = localStorage.getItem("theme");

// --- login and the event stream -------------------------------------------------------------------

let heardAt = performance.now(), broken = false;

function setLive(word) {
  if (word === "on") heardAt = performance.now();
  broken = word === "off";
  at("live").className = `live ${word}`;
  setText(at("live"), word === "on" ? "live" : "no connection to the console: trying again");
}

setInterval(() => {
  const quiet = (performance.now() - heardAt) / 1000;
  if (!broken && quiet > 15) setText(at("live"), `last heard ${Math.round(quiet)} s ago`);
}, 2000);

async function login(code) {
  const { error } = await ask("/api/login", { code });
  setText(at("login-error"), error ?? "");
  return !error;
}

async function begin() {
  const code = decodeURIComponent(location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
  if (code) await login(code);
  let open = null;
  const start = () => {
    open = follow({
      table: (form) => store.takeTable(form),
      moment: (moment) => store.takeMoment(moment),
      rates: (news) => store.takeColumns("rates", news),
      sizes: (news) => store.takeColumns("sizes", news),
    }, setLive);
  };
  whenLoggedOut(() => { if (!at("login").open) at("login").showModal(); });
  at("login-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (await login(at("login-code").value.trim())) { at("login-code").value = ""; at("login").close(); open(); }
  });
  start();
}

begin();
