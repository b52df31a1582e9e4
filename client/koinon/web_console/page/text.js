// Numbers and texts as people read them, and elements made without markup: what comes from the
// cluster is only ever set as text.

export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name === "color") made.style.backgroundColor = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Sets the text only if it differs: screen readers do not repeat an element that does not change.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en");
export const count = (number) => whole.format(Math.round(number));
export const rate = (number) => (number > 0 && number < 10 ? number.toFixed(1) : count(number));
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export function bytes(number) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (number < 1000) return unit === "B" ? `${Math.round(number)} B` : `${number.toFixed(1)} ${unit}`;
    number /= 1000;
  }
  return `${number.toFixed(1)} TB`;
}

export function milliseconds(number) {
  return number < 1000 ? `${Math.round(number)} ms` : duration(number / 1000);
}

export function duration(seconds) {
  if (seconds < 60) return seconds < 10 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

// The text of bytes in an answer: {"base64": …} if they are not UTF-8. A character that is not
// printable is shown by its number, so that none reverses or hides the text around it.
export function shownBytes(value) {
  const text = typeof value === "string" ? value : atob(value.base64);
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

// Draws a table: columns are {name, cell, number}, where cell gives text or an element.
export function table(into, columns, rows, none) {
  if (!rows.length) {
    if (into.dataset.shown !== none) into.replaceChildren(el("p", { class: "quiet" }, none));
    into.dataset.shown = none;
    return;
  }
  const cells = rows.map((row) => columns.map((column) => column.cell(row)));
  const plain = JSON.stringify([
    columns.map((column) => column.name),
    cells.map((row) => row.map((cell) => (cell instanceof Element ? cell.outerHTML : cell))),
  ]);
  if (into.dataset.shown === plain) return;
  into.dataset.shown = plain;
  const head = columns.map((c) => el("th", { scope: "col", class: c.number ? "number" : "" }, c.name));
  const body = cells.map((row) =>
    el("tr", {}, ...row.map((cell, i) => el("td", { class: columns[i].number ? "number" : "" }, cell))));
  into.replaceChildren(el("table", {},
    el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body)));
}

export function state(word, kind) {
  const mark = { good: "●", warn: "▲", bad: "✕" }[kind] || "○";
  return el("span", { class: `state ${kind}` }, el("span", { "aria-hidden": "true" }, mark), word);
}

export function bar(share, text) {
  const kind = share >= 0.95 ? "bad" : share >= 0.8 ? "warn" : "";
  const inner = el("i");
  inner.style.width = `${Math.min(100, Math.max(share > 0 ? 2 : 0, share * 100))}%`;
  return el("span", {}, el("span", { class: `bar ${kind}`, "aria-hidden": "true" }, inner), text);
}
