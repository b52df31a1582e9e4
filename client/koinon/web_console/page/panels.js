// The tables and tiles beside the map: what `koinon top` and `koinon admin status` print.

import { ask } from "./server.js";
import { nodeColor } from "./palette.js";
import { byName } from "./store.js";
import { bar, bytes, clock, count, duration, el, milliseconds, plural, rate, setText, shownBytes, state, table } from "./text.js";

const SPARK_MAX = 90, HOT_SECONDS = 3;
const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const NODE_STATES = {
  active: ["active", "good"], fenced: ["down", "bad"], draining: ["draining", "warn"], left: ["out", ""],
};

export class Panels {
  constructor(store, onNode) {
    this.store = store;
    this.history = { reads: [], writes: [], bytes: [] };
    this.tiles = new Map();
    this.hot = null;          // the last answer to a request for hot keys
    at("hot-keys").addEventListener("click", () => this.lookForHotKeys());
    store.addEventListener("moment", () => this.draw());
    store.addEventListener("table", () => this.drawKeyspaces());
  }

  draw() {
    const { top, status, failure, rates_known: known } = this.store.moment;
    const verdict = at("verdict");
    verdict.className = `verdict ${top.ok ? "good" : "bad"}`;
    setText(at("summary"), sentence(top.summary));
    this.drawAdvice(status, failure);
    this.drawTiles(top, known);
    this.drawNodes(top, status);
    if (!this.hot) this.drawBusiest(top.hottest);
    this.drawMoves(top);
    this.drawEvents(top.events);
    this.drawCoordinators(top);
  }

  // The headline already shows the first problem.
  drawAdvice(status, failure) {
    const lines = failure || !status ? [] : [...status.problems.slice(1), ...status.notes];
    const plain = JSON.stringify(lines);
    if (at("advice").dataset.shown === plain) return;
    at("advice").dataset.shown = plain;
    at("advice").replaceChildren(...lines.map((line) => el("li", {}, sentence(line))));
  }

  drawTiles(top, known) {
    const parts = top.partitions, all = parts.online + parts.offline + parts.assigned;
    const up = top.nodes.filter((node) => node.status !== "fenced" && !node.silent).length;
    const moved = top.total.read_bytes_per_second + top.total.written_bytes_per_second;
    const late = Math.max(0, ...top.nodes.map((node) => node.lag_ms ?? 0));
    this.tile(`of ${count(all)} partitions online`, count(parts.online), null, "partitions");
    this.tile(`of ${count(top.nodes.length)} nodes up`, count(up), null, "nodes");
    this.tile("Reads a second", known ? rate(top.total.reads_per_second) : "…", this.add("reads", top.total.reads_per_second, known));
    this.tile("Writes a second", known ? rate(top.total.writes_per_second) : "…", this.add("writes", top.total.writes_per_second, known));
    this.tile("Data a second", known ? bytes(moved) : "…", this.add("bytes", moved, known));
    this.tile("Copies behind by", milliseconds(late));
  }

  add(name, value, known) {
    if (known) this.history[name].push(value);
    this.history[name].splice(0, this.history[name].length - SPARK_MAX);
    return this.history[name];
  }

  tile(name, value, series = null, id = name) {
    let tile = this.tiles.get(id);
    if (!tile) {
      tile = { value: el("b"), name: el("span", { class: "quiet" }), line: null };
      const box = el("div", { class: "tile" }, tile.value, tile.name);
      if (series) {
        const svg = document.createElementNS(SVG, "svg");
        svg.setAttribute("viewBox", `0 0 ${SPARK_MAX - 1} 20`);
        svg.setAttribute("preserveAspectRatio", "none");
        svg.setAttribute("aria-hidden", "true");
        tile.line = document.createElementNS(SVG, "polyline");
        tile.line.setAttribute("class", "spark");
        svg.append(tile.line);
        box.append(svg);
      }
      at("tiles").append(box);
      this.tiles.set(id, tile);
    }
    setText(tile.value, value);
    setText(tile.name, name);
    if (series) {
      const most = Math.max(1e-9, ...series), start = SPARK_MAX - series.length;
      tile.line.setAttribute("points", series.map((v, i) => `${start + i},${(19 - (18 * v) / most).toFixed(1)}`).join(" "));
    }
  }

  drawNodes(top, status) {
    const stats = new Map((status?.nodes ?? []).map((node) => [node.id, node]));
    const places = this.store.table?.places ?? new Map();
    const rows = top.nodes.map((node) => ({ ...node, more: stats.get(node.id), disk: stats.get(node.id)?.stats ?? null }));
    const name = (row) => el("span", { class: "name" },
      el("span", { class: "swatch", color: nodeColor(places.get(row.more?.number) ?? -1), "aria-hidden": "true" }), row.id);
    const columns = [
      { name: "Node", cell: name },
      { name: "State", cell: nodeState },
      { name: "Leads", cell: (row) => count(row.primaries), number: true },
      { name: "Copies", cell: (row) => count(row.replicas), number: true },
      { name: "Reads/s", cell: (row) => known(row.reads_per_second, rate), number: true },
      { name: "Writes/s", cell: (row) => known(row.writes_per_second, rate), number: true },
      { name: "Data/s", cell: (row) => known(row.reads_per_second, () => bytes(row.read_bytes_per_second + row.written_bytes_per_second)), number: true },
      { name: "Store", cell: (row) => (row.disk ? bar(row.used_share, `${bytes(row.used_bytes)} of ${bytes(row.disk.map_bytes)}`) : "–") },
      { name: "Disk free", cell: (row) => (row.disk?.disk_bytes ? bar(1 - row.disk.disk_free_bytes / row.disk.disk_bytes, bytes(row.disk.disk_free_bytes)) : "–") },
      { name: "A commit takes", cell: (row) => known(row.disk?.commit_ms || null, milliseconds), number: true },
      { name: "Behind by", cell: (row) => known(row.lag_ms, (ms) => (row.lag_records ? `${milliseconds(ms)}, ${plural(row.lag_records, "record")}` : "0 ms")), number: true },
      { name: "Heard from", cell: (row) => heard(row, this.store.moment.lease_ms), number: true },
    ];
    if (rows.some((row) => row.more?.rack)) columns.splice(2, 0, { name: "Rack", cell: (row) => row.more?.rack ?? "" });
    table(at("nodes"), columns, rows, "No node has joined yet.");
  }

  drawBusiest(partitions, withKeys = false) {
    const columns = [
      { name: "Partition", cell: (row) => count(row.partition_id), number: true },
      { name: "Leader", cell: (row) => row.primary ?? "–" },
      { name: "Reads/s", cell: (row) => rate(row.reads_per_second), number: true },
      { name: "Writes/s", cell: (row) => rate(row.writes_per_second), number: true },
      { name: "Part of all", cell: (row) => bar(row.share, `${(row.share * 100).toFixed(1)} %`) },
      { name: "Times the mean", cell: (row) => row.times_mean.toFixed(1), number: true },
    ];
    if (withKeys) columns.splice(4, 1, { name: "Its hottest keys", cell: (row) => hotKeys(row.keys) });
    table(at("hot"), columns, partitions.slice(0, 8), "No rows are read or written now.");
  }

  async lookForHotKeys() {
    const button = at("hot-keys");
    button.disabled = true;
    setText(button, `Looking for ${HOT_SECONDS} s…`);
    const { answer, error } = await ask("/api/hot", { seconds: HOT_SECONDS });
    button.disabled = false;
    setText(button, this.hot || answer ? "Look again" : "Look for hot keys");
    if (error) { setText(at("hot-says"), error); return; }
    this.hot = answer;
    const silent = Object.entries(answer.silent).map(([node, reason]) => `${node} does not say: ${reason}.`);
    setText(at("hot-says"), `${HOT_SECONDS} seconds from ${clock(Date.now() - HOT_SECONDS * 1000)} on. ${silent.join(" ")}`);
    this.drawBusiest(answer.partitions, true);
    at("hot-advice").replaceChildren(...answer.advice.map((line) => el("li", {}, sentence(line))));
  }

  drawMoves(top) {
    const { moves } = top, box = at("moves");
    const plain = JSON.stringify(moves);
    if (box.dataset.shown !== plain) {
      box.dataset.shown = plain;
      box.replaceChildren(...(moves ? movesOf(moves) : [el("p", { class: "quiet" }, "No partition is being moved.")]));
    }
    const columns = [
      { name: "Load", cell: (row) => count(row.load_id), number: true },
      { name: "State", cell: (row) => row.state },
      { name: "Keyspace", cell: (row) => row.keyspace ?? "gone" },
      { name: "Prefix", cell: (row) => shownBytes(row.prefix) },
      { name: "Rows", cell: (row) => count(row.rows), number: true },
      { name: "Size", cell: (row) => bytes(row.bytes), number: true },
      { name: "Merged", cell: (row) => (row.partitions ? bar(row.partitions_merged / row.partitions, `${count(row.partitions_merged)} of ${count(row.partitions)}`) : "–") },
      { name: "What", cell: (row) => shownBytes(row.description) },
    ];
    table(at("loads"), columns, top.loads, "No bulk load is under way.");
  }

  drawKeyspaces() {
    const columns = [
      { name: "Keyspace", cell: (row) => el("strong", {}, row.name) },
      { name: "Partitions", cell: (row) => (row.base ? `${count(row.partition_count)} (from ${count(row.base)})` : count(row.partition_count)), number: true },
      { name: "Copies", cell: (row) => `${row.replication_factor}, ${row.min_in_sync} needed`, number: true },
      { name: "Keys are placed by", cell: (row) => row.partitioner },
      { name: "Values up to", cell: (row) => bytes(row.max_value_bytes), number: true },
      { name: "Expires", cell: (row) => (row.default_ttl_ms ? `after ${duration(row.default_ttl_ms / 1000)}` : row.max_ttl_ms ? `within ${duration(row.max_ttl_ms / 1000)}` : "never") },
      { name: "Limits a second", cell: (row) => [row.max_rows_per_s && plural(row.max_rows_per_s, "row"), row.max_bytes_per_s && bytes(row.max_bytes_per_s)].filter(Boolean).join(", ") || "none" },
    ];
    table(at("keyspaces"), columns, this.store.table.keyspaces, "");
  }

  drawEvents(events) {
    const lines = events.toReversed().map((event) => [clock(event.at_ms), event.what]);
    const plain = JSON.stringify(lines);
    if (at("events").dataset.shown === plain) return;
    at("events").dataset.shown = plain;
    const none = el("li", {}, el("span"), el("span", { class: "quiet" }, "Nothing since the console was started."));
    at("events").replaceChildren(...(lines.length ? lines.map(([time, what]) => el("li", {}, el("time", {}, time), el("span", {}, what))) : [none]));
  }

  drawCoordinators(top) {
    const columns = [
      { name: "Coordinator", cell: (row) => el("strong", {}, row.id) },
      { name: "Role", cell: (row) => (row.id === top.leader_id ? "leads" : row.voter ? "follows" : "learns") },
      { name: "State", cell: (row) => (row.active === null ? state("not known", "") : row.active || row.id === top.leader_id ? state("up", "good") : state("silent", "bad")) },
      { name: "Address", cell: (row) => row.address },
    ];
    const rows = top.coordinators.toSorted((a, b) => byName(a.id, b.id));
    table(at("coordinators"), columns, rows, "No coordinator answers.");
  }
}

const known = (value, shown) => (value === null || value === undefined ? "–" : shown(value));
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function nodeState(row) {
  if (row.silent && row.status !== "fenced") return state(`silent: ${row.silent}`, "bad");
  return state(...NODE_STATES[row.status]);
}

function heard(row, leaseMs) {
  if (row.heard_ms_ago === null) return "–";
  const text = `${milliseconds(row.heard_ms_ago)} ago`;
  return row.heard_ms_ago > Math.max(500, leaseMs) ? state(text, "warn") : text;
}

function hotKeys(keys) {
  if (!keys.length) return el("span", { class: "quiet" }, "none stands out");
  return el("span", {}, ...keys.slice(0, 3).flatMap((key, i) => [
    i ? ", " : "", el("code", {}, key.shown), ` ${Math.round(key.share_of_partition * 100)} %`]));
}

function movesOf(moves) {
  const all = moves.done + moves.running + moves.queued + moves.turned_back;
  const parts = [`${count(moves.done)} of ${plural(all, "move")} done`, `${count(moves.running)} under way`];
  if (moves.turned_back) parts.push(`${count(moves.turned_back)} turned back or dropped`);
  if (moves.paused) parts.push("paused");
  if (moves.bytes_per_second) parts.push(`${bytes(moves.bytes_per_second)} a second`);
  if (moves.seconds_left) parts.push(`about ${duration(moves.seconds_left)} left`);
  return [el("div", { class: "progress" }, bar(all ? moves.done / all : 0, "")), el("p", {}, `${parts.join(", ")}.`)];
}
