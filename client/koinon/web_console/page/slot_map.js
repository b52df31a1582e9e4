// The map of partitions on a canvas: a square each, up to 16,384 of them and more. Only squares that
// change are drawn again; an animation runs only while something fades or moves.

import { ink, inkOn, nodeColor, stateColor, theme, valueColor } from "./palette.js";
import { ADDING, PRIMARY, REMOVING, REPLICAS, stateOf } from "./store.js";

const HEIGHT = 470, SIDE_MAX = 26, SIDE_MIN = 3, FLASH_MS = 1400, FRAME_MS = 80;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class SlotMap {
  constructor(canvas, onCell) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d", { alpha: true });
    this.onCell = onCell;        // (partition or -1, {x, y} in the canvas or null, pinned)
    this.first = 0;              // the first partition that is shown
    this.count = 0;
    this.table = null;
    this.mode = "leader";
    this.valueOf = () => 0;      // by partition, for the modes that show a value
    this.most = 0;
    this.chosenNode = 0;         // number of the node whose squares alone are coloured; 0: all
    this.cursor = -1;
    this.pinned = false;
    this.marks = new Map();      // partition -> label of a key in it
    this.outlined = new Set();   // partitions that the shown step of the past has changed
    this.flashes = new Map();    // partition -> time at which the flash ends
    this.frame = 0;
    new ResizeObserver(() => this.layOut()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { if (!this.pinned) this.go(-1, null); });
    canvas.addEventListener("click", (event) => { this.pinned = false; this.point(event); this.pinned = this.cursor >= 0; this.tell(null); });
    canvas.addEventListener("keydown", (event) => this.press(event));
    canvas.addEventListener("focus", () => { if (this.cursor < 0 && this.count) this.go(0, null); });
  }

  show(table, first, count) {
    const other = first !== this.first || count !== this.count;
    this.table = table;
    if (other) {
      this.first = first;
      this.count = count;
      this.cursor = -1;
      this.pinned = false;
      this.flashes.clear();
      this.layOut();
    } else {
      this.drawAll();
    }
  }

  // Shows another version of the same partitions; those that have changed flash for a moment.
  update(table, partitions) {
    this.table = table;
    const until = performance.now() + FLASH_MS;
    const ours = partitions.filter((p) => p >= this.first && p < this.first + this.count);
    for (const partition of ours) {
      if (!still.matches) this.flashes.set(partition, until);
      this.draw(partition);
    }
    if (this.flashes.size) this.animate();
    return ours.length;
  }

  layOut() {
    const width = Math.floor(this.canvas.parentElement.clientWidth);
    if (!width || !this.count) return;
    const ideal = Math.floor(Math.sqrt((width * HEIGHT) / this.count));
    this.side = Math.max(SIDE_MIN, Math.min(SIDE_MAX, ideal));
    this.columns = evenColumns(this.count, Math.max(1, Math.min(this.count, Math.floor(width / this.side))));
    this.side = Math.min(SIDE_MAX, width / this.columns);
    if (this.side < 12) this.side = Math.floor(this.side);   // small squares of uneven sizes make patterns
    this.gap = this.side >= 12 ? 2 : this.side >= 5 ? 1 : 0;
    const height = Math.ceil(Math.ceil(this.count / this.columns) * this.side);
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    this.drawAll();
  }

  drawAll() {
    if (!this.table || !this.columns) return;
    this.pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let p = this.first; p < this.first + this.count; p += 1) this.draw(p, false);
    this.drawOver();
  }

  placeOf(partition) {
    const place = partition - this.first;
    return { x: (place % this.columns) * this.side, y: Math.floor(place / this.columns) * this.side };
  }

  color(row) {
    if (!row || !row[REPLICAS].length) return stateColor("unused");
    if (this.mode === "leader") {
      const place = this.table.places.get(row[PRIMARY]) ?? -1;
      return row[PRIMARY] ? nodeColor(place) : stateColor("offline");
    }
    if (this.mode === "state") return stateColor(stateOf(row));
    return valueColor(this.valueOf(row[0], row), this.most);
  }

  draw(partition, over = true) {
    if (!this.columns) return;
    const row = this.table.rows[partition], pen = this.pen, { x, y } = this.placeOf(partition);
    const size = this.side - this.gap, left = x + this.gap / 2, up = y + this.gap / 2;
    pen.clearRect(x, y, this.side, this.side);
    pen.globalAlpha = this.dimmed(row);
    pen.fillStyle = this.color(row);
    pen.fillRect(left, up, size, size);
    if (row && this.mode === "leader") this.drawMove(row, left, up, size);
    if (row && size >= 7) this.drawSign(stateOf(row), left, up, size);
    pen.globalAlpha = 1;
    const fade = this.fadeOf(partition);
    if (fade > 0) {
      pen.globalAlpha = fade * 0.85;
      pen.fillStyle = theme() === "dark" ? "#ffffff" : "#ffe45c";
      pen.fillRect(left, up, size, size);
      pen.globalAlpha = 1;
    }
    if (this.outlined.has(partition)) this.ring(partition, ink(), 2);
    if (over && (this.marks.size || this.cursor >= 0)) this.drawOver();
  }

  // A move shows the node that will get the partition in the corner of its square.
  drawMove(row, left, up, size) {
    if (!row[ADDING].length && !row[REMOVING].length) return;
    const to = row[ADDING][0] ?? row[REPLICAS][0];
    this.pen.fillStyle = row[ADDING].length ? nodeColor(this.table.places.get(to) ?? -1) : stateColor("moving");
    this.pen.beginPath();
    this.pen.moveTo(left + size, up);
    this.pen.lineTo(left + size, up + size);
    this.pen.lineTo(left, up + size);
    this.pen.fill();
    this.pen.strokeStyle = inkOn();
    this.pen.lineWidth = Math.max(1, size / 12);
    this.pen.beginPath();
    this.pen.moveTo(left + size, up);
    this.pen.lineTo(left, up + size);
    this.pen.stroke();
  }

  // Symbols distinguish states without colours.
  drawSign(state, left, up, size) {
    const pen = this.pen, inset = size * 0.28;
    if (state === "offline") {
      pen.strokeStyle = this.mode === "state" ? inkOn() : ink();
      pen.lineWidth = Math.max(1.5, size / 8);
      pen.beginPath();
      pen.moveTo(left + inset, up + inset); pen.lineTo(left + size - inset, up + size - inset);
      pen.moveTo(left + size - inset, up + inset); pen.lineTo(left + inset, up + size - inset);
      pen.stroke();
    } else if (state === "short" || state === "starting") {
      pen.fillStyle = this.mode === "state" ? ink() : inkOn();
      pen.beginPath();
      pen.arc(left + size / 2, up + size / 2, Math.max(1.5, size / 7), 0, 7);
      pen.fill();
    }
  }

  dimmed(row) {
    if (!this.chosenNode || !row) return 1;
    if (row[PRIMARY] === this.chosenNode) return 1;
    return row[REPLICAS].includes(this.chosenNode) ? 0.45 : 0.1;
  }

  ring(partition, color, width) {
    const { x, y } = this.placeOf(partition);
    this.pen.strokeStyle = color;
    this.pen.lineWidth = width;
    const out = this.side < 8 ? 2 : 0;
    this.pen.strokeRect(x - out + width / 2, y - out + width / 2, this.side + 2 * out - width, this.side + 2 * out - width);
  }

  drawOver() {
    for (const [partition, label] of this.marks) {
      if (partition < this.first || partition >= this.first + this.count) continue;
      this.ring(partition, inkOn(), 4);
      this.ring(partition, ink(), 2);
      if (this.side >= 14) {
        const { x, y } = this.placeOf(partition);
        this.pen.font = `700 ${Math.round(this.side * 0.55)}px system-ui, sans-serif`;
        this.pen.textAlign = "center";
        this.pen.textBaseline = "middle";
        this.pen.lineWidth = 3;
        this.pen.strokeStyle = inkOn();
        this.pen.strokeText(label, x + this.side / 2, y + this.side / 2);
        this.pen.fillStyle = ink();
        this.pen.fillText(label, x + this.side / 2, y + this.side / 2);
      }
    }
    if (this.cursor >= 0) {
      this.ring(this.cursor, inkOn(), 4);
      this.ring(this.cursor, ink(), 2);
    }
  }

  // --- animation  ------------------------------------------------------------------------------

  fadeOf(partition) {
    const until = this.flashes.get(partition);
    return until === undefined ? 0 : Math.max(0, (until - performance.now()) / FLASH_MS);
  }

  animate() {
    if (this.frame) return;
    const step = () => {
      this.frame = 0;
      const now = performance.now();
      for (const [partition, until] of this.flashes) {
        if (until <= now) this.flashes.delete(partition);
        this.draw(partition, false);
      }
      this.drawOver();
      if (this.flashes.size) next();
    };
    const next = () => { this.frame = setTimeout(() => requestAnimationFrame(step), FRAME_MS); };
    this.frame = requestAnimationFrame(step);
  }

  // --- pointer and keys ------------------------------------------------------------------------

  point(event) {
    if (this.pinned || !this.columns) return;
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const column = Math.floor(x / this.side), place = Math.floor(y / this.side) * this.columns + column;
    const inside = column < this.columns && place >= 0 && place < this.count;
    this.go(inside ? this.first + place : -1, inside ? { x, y } : null);
  }

  press(event) {
    const rows = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns,
      PageUp: -this.columns * 8, PageDown: this.columns * 8, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") { this.pinned = false; this.go(-1, null); return; }
    if (!(event.key in rows) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const last = this.first + this.count - 1;
    const from = this.cursor < 0 ? this.first : this.cursor;
    this.pinned = true;
    this.go(Math.max(this.first, Math.min(last, from + rows[event.key])), null);
  }

  go(partition, at) {
    if (partition === this.cursor && !at) return;
    const moved = partition !== this.cursor;
    this.cursor = partition;
    if (moved) this.drawAll();
    this.tell(at);
  }

  tell(at) {
    this.onCell(this.cursor, at, this.pinned);
  }
}

// Returns as many columns as fit, or a few fewer if all rows are then full.
function evenColumns(count, most) {
  for (let columns = most; columns >= most * 0.88; columns -= 1) if (count % columns === 0) return columns;
  return most;
}
