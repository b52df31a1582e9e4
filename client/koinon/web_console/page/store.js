// The state of the page: the newest table, the moment, rates and sizes, as events bring them.

export const STATE = 1, PRIMARY = 2, REPLICAS = 3, IN_SYNC = 4, ADDING = 5, REMOVING = 6, WANTED = 7,
  EPOCH = 8, REASON = 10, SHORT = 11;  // places in a row (live_state.py)
const STEPS_MAX = 500;

export class Store extends EventTarget {
  table = null;     // {version, clusterId, nodes: Map, places: Map, rows, keyspaces}
  steps = [];       // versions that can be requested, oldest first
  moment = null;
  rates = null;     // {reads, writes, bytes}: by partition
  sizes = null;     // {records, bytes}

  takeTable(form) {
    if (!form.whole && (!this.table || this.table.version !== form.base_version)) return false;
    const before = form.whole ? null : this.table;
    this.table = tableOf(form, before);
    this.steps = form.whole ? form.steps : [...this.steps, ...form.steps].slice(-STEPS_MAX);
    const changed = form.rows.map((row) => row[0]);
    this.tell("table", { changed, whole: form.whole, before });
    return true;
  }

  takeMoment(moment) {
    this.moment = moment;
    this.tell("moment");
  }

  takeColumns(name, news) {
    const kept = news.whole || !this[name] ? {} : this[name];
    for (const [column, values] of Object.entries(news)) {
      if (column === "whole" || column === "partitions") continue;
      const into = (kept[column] ||= []);
      news.partitions.forEach((partition, i) => { into[partition] = values[i]; });
    }
    this[name] = kept;
    this.tell("values", { partitions: news.partitions });
  }

  nodeOf(id) {
    return this.moment?.top.nodes.find((node) => node.id === id);
  }

  tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

// Each node has a place, which decides its colour: that of its number, which stays.
export function tableOf(form, before = null) {
  const nodes = new Map(before?.nodes);
  for (const node of form.nodes) nodes.set(node.number, node);
  const numbers = [...nodes.keys()].sort((a, b) => a - b);
  const rows = before ? before.rows.slice() : [];
  for (const row of form.rows) rows[row[0]] = row;
  return {
    version: form.version,
    clusterId: form.cluster_id,
    nodes,
    places: new Map(numbers.map((number, place) => [number, place])),
    rows,
    keyspaces: form.keyspaces ?? before?.keyspaces ?? [],
  };
}

export const nameOf = (table, number) => table.nodes.get(number)?.id ?? `node ${number}`;

export function byName(a, b) {
  return a.length - b.length || (a < b ? -1 : a > b ? 1 : 0);
}

export const STATE_WORDS = {
  online: "online", assigned: "starting", offline: "offline", moving: "being moved",
  starting: "starting", short: "short of copies", unused: "unused",
};

// The state that decides the colour of a square, the worst first.
export function stateOf(row) {
  if (!row || !row[REPLICAS].length) return "unused";
  if (row[STATE] === "offline") return "offline";
  if (row[STATE] === "assigned") return "starting";
  if (row[ADDING].length || row[REMOVING].length) return "moving";
  return row[SHORT] ? "short" : "online";
}
