// Back in time: the versions of the table that the console has seen, on a slider. The table of a
// version is requested once, and shown on the map.

import { ask } from "./server.js";
import { tableOf } from "./store.js";
import { clock, count, el, setText } from "./text.js";

const CACHED_MAX = 40;
const at = (id) => document.getElementById(id);

export class TimeTravel {
  constructor(store, onTable) {
    this.store = store;
    this.onTable = onTable;      // (table, partitions that this step changed) or (null) for now
    this.version = 0;            // the version that is shown; 0: now
    this.cached = new Map();
    at("slider").addEventListener("input", () => this.goTo(this.store.steps[Number(at("slider").value)]));
    at("now").addEventListener("click", () => this.goTo(null));
    store.addEventListener("table", (event) => { if (event.detail.whole) this.cached.clear(); this.drawSlider(); });
  }

  async goTo(step) {
    const newest = this.store.steps.at(-1);
    const version = !step || step.version === newest?.version ? 0 : step.version;
    this.version = version;
    if (!version) { this.drawSlider(); this.onTable(null); return; }
    this.drawSlider();
    const [table, before] = await Promise.all([this.tableAt(version), step.base_version ? this.tableAt(step.base_version) : null]);
    if (this.version !== version) return;      // the slider has moved since
    if (!table) { setText(at("when"), "This version is not kept any more."); return; }
    this.onTable(table, before ? changed(before, table) : []);
  }

  async tableAt(version) {
    if (this.cached.has(version)) return this.cached.get(version);
    const { answer } = await ask(`/api/table/${version}`);
    const table = answer ? tableOf(answer) : null;
    if (table) this.cached.set(version, table);
    if (this.cached.size > CACHED_MAX) this.cached.delete(this.cached.keys().next().value);
    return table;
  }

  drawSlider() {
    const { steps } = this.store, slider = at("slider"), newest = steps.length - 1;
    let place = this.version ? steps.findIndex((step) => step.version === this.version) : newest;
    if (place < 0) { this.version = 0; place = newest; this.onTable(null); }
    slider.max = Math.max(0, newest);
    slider.value = Math.max(0, place);
    slider.disabled = newest < 1;
    at("now").disabled = !this.version;
    const step = steps[place];
    if (!step) return;
    const said = step.changes.length ? step.changes.join("; ") : "the first version that this console has seen";
    const text = `${clock(step.at_ms)}, version ${count(step.version)}: ${said}`;
    slider.setAttribute("aria-valuetext", text);
    setText(at("when"), newest < 1 ? "Nothing has changed since the console was started." : text);
    at("past").hidden = !this.version;
    at("present").hidden = Boolean(this.version);
    if (this.version) at("past").replaceChildren(el("strong", {}, `As it was at ${clock(step.at_ms)}. `), `Framed squares changed then. “Now” brings you back.`);
  }
}

function changed(before, after) {
  const found = [];
  after.rows.forEach((row, partition) => {
    if (JSON.stringify(row) !== JSON.stringify(before.rows[partition])) found.push(partition);
  });
  return found;
}
