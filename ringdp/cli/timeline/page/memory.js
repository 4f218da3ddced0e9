// Bytes by category over time, beside the formula.
function drawMemory() {
  const one = data.memory[byId("engine").selectedIndex];
  const [g, wide] = surface("memory", one ? 240 : 1);
  if (!one) return;
  const left = 60, width = wide - left, height = 220; // of the area
  const { points, formula } = one, sum = (list) => list.reduce((a, b) => a + b, 0);
  const mostOf = (of) => points.reduce((a, p) => Math.max(a, of(p)), 0);
  const held = Object.keys(MEMORY), peaks = held.map((_, c) => mostOf((p) => p[c + 1]));
  // As in the formula, the peak of buckets is what they add to the peak of gathered units.
  const [gathered, buckets] = ["gathered", "buckets"].map((name) => held.indexOf(name));
  peaks[buckets] = mostOf((p) => p[gathered + 1] + p[buckets + 1]) - peaks[gathered];
  const allowed = sum(formula.map((b, c) => b ?? peaks[c]));
  const most = Math.max(allowed, mostOf((p) => sum(p.slice(1)))) * 1.06 || 1;
  const begin = points[0][0], end = Math.max(points.at(-1)[0], begin + 1);
  const x = (t) => left + ((t - begin) / (end - begin)) * width;
  const y = (b) => height - (b / most) * height;
  g.fillStyle = ink("--soft");
  for (const [t, text] of ticks(begin - first, end - first, width / 110, TIMES)) {
    const at = x(t + first);
    g.fillRect(at, height, 1, 5);
    if (at + 4 + g.measureText(text).width < wide) g.fillText(text, at + 4, height + 12);
  }
  g.textAlign = "right";
  for (const [b, text] of ticks(0, most, 5, SIZES)) {
    g.fillRect(left - 5, y(b), 5, 1);
    g.fillText(text, left - 8, Math.max(y(b), 6));
  }
  for (let c = held.length - 1; c >= 0; c--) {
    g.beginPath();
    g.moveTo(left, height);
    let before = null;
    for (const p of points) {
      const top = y(sum(p.slice(1, c + 2)));
      if (before !== null) g.lineTo(x(p[0]), before);
      g.lineTo(x(p[0]), top);
      before = top;
    }
    g.lineTo(wide, before);
    g.lineTo(wide, height);
    g.fillStyle = colorOf(MEMORY[held[c]]);
    g.fill();
  }
  g.setLineDash([6, 4]);
  g.strokeStyle = ink("--text");
  g.lineWidth = 1.5;
  g.beginPath();
  g.moveTo(left, y(allowed));
  g.lineTo(wide, y(allowed));
  g.stroke();
  table("bytes", ["bytes", "peak", "formula", ""], held.map((name, c) =>
    [name, bytes(peaks[c]), formula[c] === null ? "–" : bytes(formula[c]),
      formula[c] === null ? "" : peaks[c] === formula[c] ? "=" : "≠"]));
  byId("memorySays").textContent = "The colors show what uses the bytes. The dashed line is the formula's sum, the planned peak" +
    (formula.includes(null) ? `; there is none for ${one.optimizers}, so the measured peak is used.` : ".");
  mark("bytes", held.map((name) => colorOf(MEMORY[name])));
}
