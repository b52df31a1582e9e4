// "Where is my key?": shows the way of a key from its bytes to its nodes. The server computes it with
// the code that clients use; the page shows the answer, and the key falls into its nodes' lanes.

import { ask } from "./server.js";
import { nodeColor, textOn } from "./palette.js";
import { byName } from "./store.js";
import { count, el, setText, state, table as drawTable } from "./text.js";

const PAUSE_MS = 120, KEPT_MAX = 50, LANES_MAX = 8, KEY_BYTES_MAX = 500;
const still = matchMedia("(prefers-reduced-motion: reduce)");
const at = (id) => document.getElementById(id);

export class KeyFinder {
  constructor(store, keyspace, onPlaces) {
    this.store = store;
    this.keyspace = keyspace;       // () => the name of the keyspace that is shown
    this.onPlaces = onPlaces;       // (Map of partition -> label)
    this.kept = [];                 // keys in the form of requests: {text} or {hex}
    this.answers = [];              // of the kept keys and, last, of the key being typed
    this.asked = 0;                 // the number of the newest request
    this.timer = 0;
    const input = at("find-key");
    input.addEventListener("input", () => this.soon());
    input.addEventListener("paste", (event) => this.paste(event));
    for (const choice of document.querySelectorAll("input[name=form]")) choice.addEventListener("change", () => this.find());
    at("find-form").addEventListener("submit", (event) => { event.preventDefault(); this.keep([input.value]); input.value = ""; });
    at("find-clear").addEventListener("click", () => { this.kept = []; input.value = ""; input.focus(); this.find(); });
    store.addEventListener("table", () => { if (this.answers.length) this.soon(); });
  }

  keyOf(typed) {
    const hex = document.querySelector("input[name=form]:checked").value === "hex";
    return hex ? { hex: typed.trim() } : { text: typed };
  }

  keep(lines) {
    const known = new Set(this.kept.map((key) => JSON.stringify(key)));
    for (const line of lines) {
      const key = line && this.keyOf(line);
      if (key && !faultOf(key) && !known.has(JSON.stringify(key))) { this.kept.push(key); known.add(JSON.stringify(key)); }
    }
    this.kept = this.kept.slice(-KEPT_MAX);
    this.find();
  }

  paste(event) {
    const lines = event.clipboardData.getData("text").split(/\r?\n/);
    if (lines.length < 2) return;
    event.preventDefault();
    this.keep(lines);
  }

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.find(), PAUSE_MS);
  }

  async find() {
    clearTimeout(this.timer);
    const number = (this.asked += 1), typed = at("find-key").value;
    const keys = [...this.kept];
    const fault = typed ? faultOf(this.keyOf(typed)) : "";
    if (typed && !fault) keys.push(this.keyOf(typed));
    if (!keys.length || !this.store.table) { this.show([], fault); return; }
    const { answer, error } = await ask("/api/where", { keyspace: this.keyspace(), keys });
    if (number !== this.asked) return;      // another key is typed by now
    if (error) { setText(at("find-error"), error); return; }
    this.show(answer, fault);
  }

  show(answers, error) {
    setText(at("find-error"), error);
    const before = new Map(this.answers.map((one) => [one.hex, one]));
    this.answers = answers;
    at("find-hint").hidden = answers.length > 0;
    this.drawSteps(answers.at(-1));
    this.drawLanes(before);
    this.drawList();
    this.onPlaces(new Map(answers.map((one, place) => [one.partition_id, String(place + 1)])));
  }

  drawSteps(one) {
    const list = at("steps");
    if (!one) { list.replaceChildren(); list.dataset.key = ""; return; }
    const plain = JSON.stringify([one, this.keyspace()]);
    if (list.dataset.key === plain) return;
    list.dataset.key = plain;
    const keyspace = this.store.table.keyspaces.find((k) => k.name === this.keyspace());
    const hash = (keyspace?.partitioner ?? "").split("(")[0];
    const of = keyspace ? ` of ${count(keyspace.partition_count)}` : "";
    const base = keyspace?.base ?? 0;
    const copies = one.replicas.filter((name) => name !== one.primary).map((name) => name ?? "?");
    const steps = [
      ["Key", shownKey(one)],
      [`Hash`, el("span", {}, el("code", {}, groups(one.hash)), ` (${hash} of ${partOf(one)})`)],
      ["Partition", el("span", {}, el("strong", {}, count(one.partition_id)), base ? ` (${count(one.partition_id - base)}${of} in this keyspace)` : of)],
      ["Leader", el("span", {}, el("strong", {}, one.primary ?? "nobody"), " reads and writes it")],
      ["Copies", copies.length ? `${copies.join(", ")}${one.in_sync.length === one.replicas.length ? "" : `; in sync: ${one.in_sync.join(", ")}`}` : "none beside the leader's"],
    ];
    const items = steps.map(([name, said]) => el("li", {}, el("b", {}, name), said instanceof Element ? said : el("span", {}, said)));
    list.replaceChildren(...items);
    if (!still.matches && one.hex !== this.lastShown) {
      items.forEach((item, i) => item.animate([{ opacity: 0, transform: "translateY(-6px)" }, { opacity: 1, transform: "none" }], { duration: 220, delay: i * 70, fill: "backwards", easing: "ease-out" }));
    }
    this.lastShown = one.hex;
  }

  drawLanes(before) {
    const box = at("lanes"), { table } = this.store;
    if (!this.answers.length) { box.replaceChildren(); return; }
    const used = new Set(this.answers.flatMap((one) => one.replicas));
    const all = [...table.nodes.values()].filter((node) => node.status !== "left");
    const chosen = all.length <= LANES_MAX ? all : all.filter((node) => used.has(node.id)).slice(0, LANES_MAX);
    const lanes = new Map();
    for (const node of chosen.sort((a, b) => byName(a.id, b.id))) {
      const lane = el("div", { class: "lane" }, el("h3", { title: node.id }, node.id));
      lane.style.borderTopColor = nodeColor(table.places.get(node.number));
      lanes.set(node.id, lane);
    }
    box.replaceChildren(...lanes.values());
    this.answers.forEach((one, place) => {
      const known = before.get(one.hex), landed = known && known.primary === one.primary;
      for (const name of one.replicas) {
        const leads = name === one.primary, lane = lanes.get(name);
        if (!lane) continue;
        const drop = el("div", { class: leads ? "drop" : "drop copy", title: one.shown }, leads ? `${place + 1}  ${one.shown}` : `${place + 1} copy`);
        const node = chosen.find((known) => known.id === name), color = table.places.get(node.number);
        drop.style.backgroundColor = nodeColor(color);
        drop.style.color = textOn(color);
        lane.append(drop);
        if (!landed && !still.matches) fall(drop, leads);
      }
    });
  }

  drawList() {
    const columns = [
      { name: "No.", cell: (row) => String(row.place), number: true },
      { name: "Key", cell: (row) => row.one.shown },
      { name: "Partition", cell: (row) => count(row.one.partition_id), number: true },
      { name: "Leader", cell: (row) => row.one.primary ?? state("nobody", "bad") },
      { name: "State", cell: (row) => (row.one.status === "online" ? state("online", "good") : state(row.one.status === "assigned" ? "starting" : "offline", "bad")) },
    ];
    const rows = this.answers.map((one, i) => ({ one, place: i + 1 }));
    drawTable(at("found"), columns, rows.length > 1 ? rows : [], "");
  }
}

// A key comes down from above: its leader's part with a small bounce, the copies after it.
function fall(drop, leads) {
  const from = { transform: "translateY(-140px)", opacity: 0 };
  const frames = leads
    ? [from, { transform: "translateY(0)", opacity: 1, offset: 0.7, easing: "ease-out" }, { transform: "translateY(-7px)", offset: 0.85 }, { transform: "none" }]
    : [{ transform: "translateY(-60px)", opacity: 0 }, { transform: "none", opacity: 1 }];
  drop.animate(frames, { duration: leads ? 620 : 380, delay: leads ? 260 : 720, easing: "ease-in", fill: "backwards" });
}

// The key with the bytes that are hashed marked; in hexadecimal if it is no plain text.
function shownKey(one) {
  const text = typeof one.key === "string" && one.key === one.shown ? one.key : null;
  const whole = one.routing_hex === one.hex;
  if (text === null || (!whole && (one.routing_start === null || typeof one.routing_bytes !== "string"))) {
    return el("span", {}, el("code", {}, one.shown), text === null ? ` (bytes ${spaced(one.hex)})` : "");
  }
  if (whole) return el("code", {}, el("mark", {}, text));
  const start = text.indexOf(one.routing_bytes);
  return el("code", {}, text.slice(0, start), el("mark", {}, one.routing_bytes), text.slice(start + one.routing_bytes.length));
}

function partOf(one) {
  if (one.routing_hex === one.hex) return "the whole key";
  return one.routing_start === null ? `bytes ${spaced(one.routing_hex)}` : `“${one.routing_shown}”`;
}

const spaced = (hex) => hex.replace(/..(?=.)/g, "$& ");
const groups = (digits) => digits.replace(/\B(?=(\d{3})+$)/g, "\u202f");

// Returns why this is no valid key; "" if it is.
function faultOf(key) {
  if (key.hex !== undefined && !/^(\s*[0-9a-f]{2})*\s*$/i.test(key.hex)) return "Hexadecimal digits come in pairs: 6b 65 79";
  const length = key.hex === undefined ? new TextEncoder().encode(key.text).length : key.hex.replace(/\s/g, "").length / 2;
  if (!length) return "A key has at least one byte.";
  return length > KEY_BYTES_MAX ? `A key has ${KEY_BYTES_MAX} bytes at most; these are ${count(length)}.` : "";
}
