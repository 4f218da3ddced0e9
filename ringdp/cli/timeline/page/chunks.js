// One collective, chunk by chunk, beside the replay of its algorithm.
let chosen = 0, timer = null, cursor = null, replaying = "";
let walked = -1; // the chunk that keys have come to

function choose(i) {
  stop();
  walked = -1;
  chosen = Math.max(0, Math.min(data.collectives.length - 1, i));
  byId("which").value = chosen;
  byId("before").disabled = chosen === 0;
  byId("after").disabled = chosen === data.collectives.length - 1;
  const c = data.collectives[chosen], key = `${c.algorithm} on ${c.ranks}`;
  const page = c.collective === "all_reduce" ? data.replays[key] : undefined;
  byId("play").disabled = !data.chunks[chosen].length;
  byId("replay").hidden = !page;
  byId("noReplay").hidden = Boolean(page);
  byId("noReplay").textContent = c.collective === "all_reduce"
    ? `The rounds of ${key} are not replayed: ${data.unplayed[key] ?? "nothing is known of them"}.`
    : "Beneath the chunks of an all_reduce its algorithm's rounds are replayed.";
  if (page && replaying !== key) byId("replay").srcdoc = page;
  if (page) replaying = key;
  byId("chunkSays").textContent = `${c.name}, ${c.algorithm}, ${bytes(c.bytes)} bytes on ` +
    `${counted(c.ranks, "rank")}, at ${c.at}: ${us(c.measured)}` +
    (c.predicted === null ? "" : `, predicted ${us(c.predicted)}`) +
    `. Rank ${c.lateRank} came ${us(c.late)} after the first.` +
    (c.failed ? " It failed." : c.whole ? "" : " Not every rank has ended it.");
  drawChunks();
}

// The index of the last collective that moves the most bytes.
const largest = () =>
  data.collectives.reduce((best, c, i, all) => (c.bytes >= all[best].bytes ? i : best), 0);

const extent = () => extentOf(data.chunks[chosen]);
const ranksOf = (spans) => [...new Set(spans.map((s) => s[0]))].sort((a, b) => a - b);
const margin = (width) => (width > 600 ? 56 : 26); // for ranks, left of their chunks

function drawChunks() {
  const spans = data.chunks[chosen], ranks = ranksOf(spans);
  const [g, width] = surface("chunks", 34 + ranks.length * 30);
  g.fillStyle = ink("--soft");
  if (!spans.length) {
    g.fillText(data.collectives[chosen].ranks === 1 ? "One rank moves nothing."
      : "No chunks: nothing moved, or the transport tells only begin and end.", 0, 12);
    return;
  }
  const [begin, end] = extent(), left = margin(width), scale = (width - left) / (end - begin);
  const rounds = 1 + spans.reduce((most, s) => Math.max(most, s[4]), 0);
  ranks.forEach((rank, i) => g.fillText(width > 600 ? `rank ${rank}` : rank, 0, 18 + i * 30));
  for (const [rank, name, from, duration, round, , waited] of spans) {
    const x = left + (from - begin) * scale, y = 6 + ranks.indexOf(rank) * 30;
    const w = Math.max(duration * scale, 0.7), part = Math.min(1, waited / (duration || 1));
    g.fillStyle = color((360 * Math.max(0, round)) / rounds);
    g.globalAlpha = 0.28;
    g.fillRect(x, y, w, 24); // waiting for a peer
    g.globalAlpha = 1;
    g.fillRect(x + w * part, y, w * (1 - part), 24);
    if (w > 60) {
      g.fillStyle = w * part > 30 ? ink("--text") : "#10141a";
      label(g, data.names[name], x, y, w - 2, 24);
    }
  }
  g.fillStyle = ink("--soft");
  g.fillText(`${us(end - begin)}; a color is a round, pale is waiting for a peer`, left, 20 + ranks.length * 30);
  if (cursor !== null) {
    g.fillStyle = ink("--text");
    g.fillRect(left + (cursor - begin) * scale, 0, 2, ranks.length * 30 + 8);
  }
}

function chunkAt(x, y) {
  const spans = data.chunks[chosen], ranks = ranksOf(spans);
  const width = byId("chunks").clientWidth, left = margin(width), [begin, end] = extent();
  const at = begin + ((x - left) / (width - left)) * (end - begin), near = (end - begin) / width;
  const rank = ranks[Math.floor((y - 3) / 30)];
  return spans.findLastIndex((s) => s[0] === rank && s[2] - near <= at && at <= s[2] + s[3] + near);
}

function tellChunk(i) {
  if (i < 0) return;
  const [rank, name, begin, duration, round, piece, waited, size] = data.chunks[chosen][i];
  byId("chunkSays").textContent = `rank ${rank}: ${data.names[name]}` +
    (round < 0 ? "" : `, round ${round}`) + `, piece ${piece}, ${bytes(size)} bytes, from ` +
    `${us(begin - extent()[0])} for ${us(duration)}` +
    (waited ? `, of which it waited ${us(waited)} for a peer.` : ".");
}

// Walk through the chunks in the order in which they began.
function walkChunks(by) {
  const spans = data.chunks[chosen], order = spans.map((_, i) => i).sort((a, b) => spans[a][2] - spans[b][2]);
  const place = Math.max(0, Math.min(order.length - 1, order.indexOf(walked) + by));
  if (!order.length) return;
  walked = order[place];
  cursor = spans[walked][2];
  tellChunk(walked);
  follow(cursor);
  drawChunks();
}

// Show in the replay the round that the slowest rank has reached at that moment.
function follow(moment) {
  const begun = data.chunks[chosen].filter((s) => s[2] <= moment);
  const latest = new Map(begun.map((s) => [s[0], s[4]]));
  const round = latest.size ? Math.min(...latest.values()) : -1;
  byId("replay").contentWindow?.go?.(round);
  return round;
}

function play() {
  if (timer) return stop();
  if (!data.chunks[chosen].length) return;
  const [begin, end] = extent(), ticks = 80;
  let tick = 0;
  byId("play").textContent = "Stop";
  timer = setInterval(() => {
    cursor = begin + ((end - begin) * tick) / ticks;
    follow(cursor);
    drawChunks();
    if (tick++ >= ticks) stop();
  }, 50);
}

function stop() {
  clearInterval(timer);
  timer = cursor = null;
  byId("play").textContent = "Play";
  if (data) drawChunks();
}
