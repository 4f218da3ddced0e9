// The timeline: every rank's lanes, with zooming and panning.
const LANE = 20;

// Called once: compute each lane's place and the nesting depth of its spans.
function layOut() {
  let y = 0;
  let rank = null;
  for (const lane of data.lanes) {
    if (lane.rank !== rank) {
      rank = lane.rank;
      rows.push({ y, title: `rank ${rank}` });
      y += 18;
    }
    const open = [];
    let deep = 1;
    lane.depths = lane.spans.map(([, , begin, duration]) => {
      while (open.length && open.at(-1) <= begin + 0.0005) open.pop();
      open.push(begin + duration);
      deep = Math.max(deep, open.length);
      return open.length - 1;
    });
    lane.longest = lane.spans.reduce((most, s) => Math.max(most, s[3]), 0);
    rows.push({ y, lane, deep });
    y += 14 + Math.min(deep, 4) * LANE;
  }
  tall = y;
}

// The intervals [begin, end] of a collective for which its rank waited.
function* exposed(rank, begin, end) {
  const all = data.waits[rank];
  for (let i = firstOf(all, (wait) => wait[1] > begin); i < all.length && all[i][0] < end; i++) {
    yield [Math.max(begin, all[i][0]), Math.min(end, all[i][1])];
  }
}

// The indices of a lane's visible spans; spans are sorted by begin.
function* shown(lane) {
  const low = firstOf(lane.spans, (span) => span[2] >= view[0] - lane.longest);
  for (let i = low; i < lane.spans.length && lane.spans[i][2] <= view[1]; i++) yield i;
}

function box(row, i, width) {
  const [, , begin, duration] = row.lane.spans[i], scale = width / (view[1] - view[0]);
  const y = row.y + 14 + Math.min(row.lane.depths[i], 3) * LANE;
  return [(begin - view[0]) * scale, y, Math.max(duration * scale, 0.7), LANE - 2];
}

function drawTimeline() {
  const [g, width] = surface("timeline", tall);
  const scale = width / (view[1] - view[0]);
  const marks = ticks(view[0] - first, view[1] - first, width / 110, TIMES);
  const place = (t) => Math.round((t + first - view[0]) * scale);
  g.fillStyle = ink("--empty");
  for (const [t] of marks) g.fillRect(place(t), 0, 1, tall);
  for (const row of rows) {
    g.fillStyle = ink(row.lane ? "--soft" : "--text");
    g.fillText(row.lane ? row.lane.title : row.title, 0, row.y + 7);
    if (!row.lane) {
      g.fillStyle = ink("--soft");
      for (const [t, text] of marks) {
        const x = place(t) + 4;
        if (x > 60 && x + g.measureText(text).width < width) g.fillText(text, x, row.y + 7);
      }
      continue;
    }
    const drawn = []; // by depth: up to where
    for (const i of shown(row.lane)) {
      const [name, category, begin, duration] = row.lane.spans[i], depth = row.lane.depths[i];
      const [x, y, w, h] = box(row, i, width);
      if (w < 1 && x < drawn[depth] && !isPicked(row.lane, i)) continue;
      drawn[depth] = x + w;
      g.fillStyle = colorOf(data.names[category]);
      g.fillRect(x, y, w, h);
      if (data.names[category] === "collective") {
        g.fillStyle = colorOf("wait");
        for (const [from, to] of exposed(row.lane.rank, begin, begin + duration)) {
          const left = (from - view[0]) * scale;
          g.fillRect(left, y, Math.max((to - from) * scale, 0.7), h);
        }
      }
      if (isPicked(row.lane, i)) {
        g.strokeStyle = ink("--text");
        g.lineWidth = 2;
        g.strokeRect(x, y + 1, Math.max(w, 3), h - 2);
      }
      const left = Math.max(x, 0), seen = x + w - left;
      if (seen > 46) {
        g.fillStyle = inkOn(data.names[category]);
        label(g, data.names[name], left, y, seen - 3, h);
      }
    }
  }
  byId("range").textContent = `${us(view[0] - first)} – ${us(view[1] - first)}`;
}

function spanAt(x, y) {
  const width = byId("timeline").clientWidth;
  for (const row of rows) {
    if (!row.lane || y < row.y || y > row.y + 14 + Math.min(row.deep, 4) * LANE) continue;
    for (const i of [...shown(row.lane)].reverse()) {
      const [left, top, w, h] = box(row, i, width);
      if (x >= left - 2 && x <= left + w + 2 && y >= top && y <= top + h) return [row.lane, i];
    }
  }
  return null;
}

const isPicked = (lane, i) => picked !== null && picked[0] === lane && picked[1] === i;

function pick(found) {
  if (!found) return;
  picked = found;
  tell(found);
  const [, , begin, duration] = found[0].spans[found[1]];
  if (begin > view[1] || begin + duration < view[0]) {
    const half = (view[1] - view[0]) / 2;
    show(begin - half, begin + half);
  } else drawTimeline();
}

// Go to the next span of the lane (across = 0), or to one of the next lane at about this time.
function walk(along, across) {
  const lanes = rows.filter((row) => row.lane).map((row) => row.lane);
  if (!picked) return pick(lanes.length ? [lanes[0], [...shown(lanes[0])][0] ?? 0] : null);
  const [lane, i] = picked;
  if (!across) return pick(lane.spans[i + along] ? [lane, i + along] : null);
  const other = lanes[lanes.indexOf(lane) + across];
  if (!other) return;
  const at = other.spans.findIndex((s) => s[2] + s[3] >= lane.spans[i][2]);
  pick([other, at < 0 ? other.spans.length - 1 : at]);
}

function tell(found) {
  if (!found) return;
  const [lane, i] = found, [name, category, begin, duration, at] = lane.spans[i];
  const where = at < 0 ? "" : `, called at ${data.names[at]}`;
  byId("timelineSays").textContent = `rank ${lane.rank}, ${lane.title}: ${data.names[name]} ` +
    `(${data.names[category]}), from ${us(begin - first)} for ${us(duration)}${where}.`;
}

function show(begin, end) {
  const wide = Math.min(Math.max(end - begin, 1), last - first);
  const from = Math.min(Math.max(begin, first), last - wide);
  view = [from, from + wide];
  drawTimeline();
}

function zoom(factor, at = (view[0] + view[1]) / 2) {
  show(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
}

const move = (share) => show(...view.map((t) => t + share * (view[1] - view[0])));

// Show from one optimizer step to the next. Ranks are alike, so the first rank's steps count.
function nextStep() {
  const spans = data.lanes.filter((l) => l.rank === data.lanes[0].rank).flatMap((l) => l.spans);
  const steps = spans.filter(([, category]) => data.names[category] === "step");
  const ends = steps.map(([, , begin, duration]) => begin + duration).sort((a, b) => a - b);
  if (ends.length < 2) return;
  const whole = view[1] - view[0] > 0.99 * (last - first);
  let i = whole ? 0 : ends.findIndex((t) => t > view[0] + 1);
  if (i < 0 || i + 1 >= ends.length) i = 0;
  show(ends[i], ends[i + 1]);
}
