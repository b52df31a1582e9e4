// Colours of the map, for light and dark: those of nodes differ for colour-blind eyes as well
// (after Okabe and Ito); values go from faint to strong in one hue and in lightness.

const NODES = {
  light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8f00", "#5b4b8a"],
  dark: ["#3f9fe0", "#f0b53a", "#2cc198", "#dd92bd", "#8fd0f7", "#f0793a", "#c9c63f", "#a695dd"],
};
const STATES = {
  light: { online: "#a9c9bd", starting: "#d9a520", short: "#e07b00", moving: "#7a5cc4", offline: "#c62820", unused: "#e4e9ef" },
  dark: { online: "#3f6f60", starting: "#e0b437", short: "#f08c1e", moving: "#a58bf0", offline: "#ff5a4f", unused: "#2a3542" },
};
const RAMPS = {
  light: [[228, 233, 239], [148, 196, 223], [33, 113, 181], [8, 40, 92]],
  dark: [[38, 49, 61], [24, 96, 122], [63, 178, 157], [246, 233, 120]],
};

const wish = matchMedia("(prefers-color-scheme: dark)");

export function theme() {
  return document.documentElement.dataset.theme || (wish.matches ? "dark" : "light");
}

export function onTheme(callback) {
  wish.addEventListener("change", callback);
  document.addEventListener("theme", callback);
}

export function nodeColor(place) {
  const known = NODES[theme()];
  if (place < 0) return STATES[theme()].unused;
  if (place < known.length) return known[place];
  return `oklch(${theme() === "dark" ? 0.72 : 0.58} 0.13 ${(place * 137.5) % 360})`;
}

export const stateColor = (name) => STATES[theme()][name];

// The colour of a value between 0 and the greatest; small values stay distinguishable.
export function valueColor(value, most) {
  const ramp = RAMPS[theme()];
  if (!(value > 0) || !(most > 0)) return `rgb(${ramp[0].join(" ")})`;
  const place = (0.08 + 0.92 * (Math.log1p(value) / Math.log1p(most))) * (ramp.length - 1);
  const from = Math.min(ramp.length - 2, Math.floor(place));
  const mixed = ramp[from].map((c, i) => Math.round(c + (ramp[from + 1][i] - c) * (place - from)));
  return `rgb(${mixed.join(" ")})`;
}

export const inkOn = () => (theme() === "dark" ? "#0b1118" : "#ffffff");
export const ink = () => (theme() === "dark" ? "#ffffff" : "#0b1118");

// Black or white, whichever has more contrast to the colour of the node at this place.
export function textOn(place) {
  const hex = /^#(..)(..)(..)$/.exec(nodeColor(place));
  if (!hex) return theme() === "dark" ? "#0b1118" : "#ffffff";
  const [r, g, b] = hex.slice(1).map((part) => (parseInt(part, 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#0b1118" : "#ffffff";
}
