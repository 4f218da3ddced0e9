"use strict";
// Shared by all sections: the data, colors, tables, canvases.
const byId = (id) => document.getElementById(id);
const COLORS = { // by category: hue and lightness
  forward: [250, .6], recompute: [250, .8], backward: [300, .55], step: [145, .6],
  gather: [75, .72], prefetch: [100, .88], unshard: [50, .48], free: [120, .78],
  reduce: [335, .62], finish: [335, .84], wait: [28, .62], collective: [200, .66],
};
const MEMORY = { // by category: what uses it, whose color it has
  parameters: "forward", gathered: "gather", gradients: "backward", buckets: "reduce",
  optimizer: "step",
};
const dark = matchMedia("(prefers-color-scheme: dark)");
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (hue, light = .62) => `oklch(${light} .15 ${hue})`; // on light and dark pages
const colorOf = (category) => color(...(COLORS[category] ?? [0, .62]));
const inkOn = (category) => (COLORS[category]?.[1] >= .6 ? "#10141a" : "#fff");
const us = (t) => t >= 1e6 ? `${(t / 1e6).toFixed(3)} s` : t >= 1e3 ? `${(t / 1e3).toFixed(2)} ms`
  : `${t.toFixed(t && t < 10 ? 2 : 1)} µs`;
const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const bytes = (b) => b.toLocaleString("en");
function median(list) {
  const sorted = list.toSorted((a, b) => a - b), half = list.length >> 1;
  return (sorted[half] + sorted[list.length - 1 - half]) / 2;
}
let data, first = 0, last = 1; // µs of all
let view = [0, 1]; // what the timeline shows
let rows = [], tall = 0; // of the timeline: lanes and what they hang on; its height
let picked = null; // lane and index of the span that keys have come to

const TIMES = [[1, "µs"], [1e3, "ms"], [1e6, "s"]];
const SIZES = [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"]];

// The round numbers (1, 2, 5, 10, 20, ...) from low to high.
function rounded(low, high, digits = [1, 2, 5]) {
  const found = [];
  for (let decade = 10 ** Math.floor(Math.log10(low)); decade <= high; decade *= 10) {
    found.push(...digits.map((digit) => digit * decade).filter((t) => low <= t && t <= high));
  }
  return found;
}

// At most `most` + 1 equidistant values, each with its label.
function ticks(low, high, most, units) {
  const least = (high - low) / most, by = rounded(least, 10 * least)[0];
  const [unit, name] = units.findLast(([size]) => size <= high) ?? units[0];
  const digits = Math.max(0, Math.ceil(-Math.log10(by / unit) - 1e-9));
  const found = [];
  for (let i = Math.ceil(low / by); i * by <= high; i++) {
    found.push([i * by, `${((i * by) / unit).toFixed(digits)} ${name}`]);
  }
  return found;
}

// The first index from which on `holds` is true; binary search.
function firstOf(list, holds) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(list[middle])) high = middle; else low = middle + 1;
  }
  return low;
}

// When the first of them begins and the last ends. There may be too many for Math.min(...).
function extentOf(spans) {
  if (!spans.length) return [0, 1];
  let begin = Infinity, end = -Infinity;
  for (const [, , from, duration] of spans) {
    begin = Math.min(begin, from);
    end = Math.max(end, from + duration);
  }
  return [begin, Math.max(end, begin + 0.1)];
}

function make(tag, text, parent, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  parent.append(made);
  return made;
}

function table(id, head, lines, pick) {
  const where = byId(id);
  where.replaceChildren();
  const top = make("tr", undefined, make("thead", undefined, where));
  for (const title of head) make("th", title, top).scope = "col";
  const body = make("tbody", undefined, where);
  lines.forEach((cells, i) => {
    const line = make("tr", undefined, body, pick ? "pick" : "");
    for (const cell of cells) make("td", cell, line);
    if (pick) {
      line.tabIndex = 0;
      line.addEventListener("click", () => pick(i));
      line.addEventListener("keydown", (e) => { if (e.key === "Enter") pick(i); });
    }
  });
}

// Mark the first cell of each line with a color.
function mark(id, colors) {
  byId(id).querySelectorAll("tbody td:first-child").forEach((cell, i) => {
    cell.style.boxShadow = `inset 4px 0 ${colors[i]}`;
    cell.style.paddingLeft = "9px";
  });
}

// Handle a canvas's keys. With Ctrl or the command key they are left to the browser.
function onKeys(id, acts) {
  byId(id).addEventListener("keydown", (e) => {
    if (!acts[e.key] || e.ctrlKey || e.metaKey) return;
    e.preventDefault();
    acts[e.key]();
  });
}

// Draw text clipped to a box.
function label(g, text, x, y, width, height) {
  g.save();
  g.beginPath();
  g.rect(x, y, width, height);
  g.clip();
  g.fillText(text, x + 4, y + height / 2);
  g.restore();
}

// Size a canvas to its place; return a context in CSS pixels, and the width.
function surface(id, height) {
  const canvas = byId(id), width = canvas.clientWidth, scale = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const g = canvas.getContext("2d");
  g.scale(scale, scale);
  g.font = "12px system-ui, sans-serif";
  g.textBaseline = "middle";
  return [g, width];
}
