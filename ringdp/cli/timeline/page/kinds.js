// Predicted and measured times of each kind of collective.
let kinds = [];

function groupKinds() {
  const whole = data.collectives.map((c, place) => ({ ...c, place })).filter((c) => c.whole);
  const key = (c) => [c.collective, c.algorithm, c.ranks, c.bytes].join(" ");
  kinds = [...Map.groupBy(whole, key).values()].map((all) => {
    const of = (name) => median(all.map((c) => c[name]));
    const slowest = all.reduce((a, b) => (b.measured > a.measured ? b : a)).place;
    return { ...all[0], times: all.length, measured: of("measured"), late: of("late"), slowest };
  });
  kinds.sort((a, b) => b.measured * b.times - a.measured * a.times);
}

const colorOfKind = (kind) =>
  colorOf({ all_gather: "gather", reduce_scatter: "reduce" }[kind.collective] ?? "collective");

function drawKinds() {
  const head = ["collective", "algorithm", "ranks", "bytes", "times", "measured", "predicted",
    "measured / predicted", "late"];
  table("kinds", head, kinds.map((k) => [k.collective, k.algorithm, k.ranks, bytes(k.bytes),
    k.times.toLocaleString("en"), us(k.measured), k.predicted === null ? "–" : us(k.predicted),
    k.predicted ? (k.measured / k.predicted).toFixed(2) : "–", us(k.late)]),
  (i) => { choose(kinds[i].slowest); byId("which").scrollIntoView({ block: "center" }); });
  const dots = kinds.filter((k) => k.predicted > 0 && k.measured > 0);
  const height = dots.length ? 240 : 1, [g, width] = surface("scatter", height);
  if (!dots.length) return;
  const every = dots.flatMap((k) => [k.predicted, k.measured]);
  const low = Math.log(Math.min(...every)) - 0.4, high = Math.log(Math.max(...every)) + 0.4;
  const x = (t) => 8 + ((Math.log(t) - low) / (high - low)) * (width - 16);
  const y = (t) => height - 8 - ((Math.log(t) - low) / (high - low)) * (height - 16);
  g.strokeStyle = ink("--line");
  g.strokeRect(0.5, 0.5, width - 1, height - 1);
  g.beginPath();
  g.moveTo(x(Math.exp(low)), y(Math.exp(low)));
  g.lineTo(x(Math.exp(high)), y(Math.exp(high)));
  g.stroke();
  g.fillStyle = ink("--soft");
  g.fillText("measured ↑", 8, 14);
  g.textAlign = "right";
  g.fillText("predicted →", width - 8, height - 28);
  const digits = width / ((high - low) / Math.LN10) > 200 ? [1, 2, 5] : [1];
  for (const t of rounded(Math.exp(low), Math.exp(high), digits)) {
    g.fillRect(x(t), height - 5, 1, 5);
    g.fillRect(0, y(t), 5, 1);
    g.textAlign = "center";
    if (x(t) > 90 && x(t) < width - 40) g.fillText(us(t), x(t), height - 12);
    g.textAlign = "left";
    if (y(t) > 28 && y(t) < height - 28) g.fillText(us(t), 8, y(t));
  }
  for (const k of dots) {
    g.beginPath();
    g.arc(x(k.predicted), y(k.measured), 5, 0, 7);
    g.fillStyle = colorOfKind(k);
    g.fill();
  }
  mark("kinds", kinds.map(colorOfKind));
}
