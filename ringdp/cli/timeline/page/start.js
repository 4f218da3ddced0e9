// Unpacks the data, fills in the page, and attaches the event listeners.
function drawAll() {
  drawTimeline();
  drawMemory();
  drawKinds();
  if (data.collectives.length) drawChunks();
}

function listen() {
  const canvas = byId("timeline");
  const clicks = {
    in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.3), right: () => move(0.3),
    fit: () => show(first, last), step: nextStep, play,
    before: () => choose(chosen - 1), after: () => choose(chosen + 1),
  };
  for (const [id, act] of Object.entries(clicks)) byId(id).addEventListener("click", act);
  onKeys("timeline", {
    ArrowLeft: clicks.left, ArrowRight: clicks.right, "+": clicks.in, "=": clicks.in,
    "-": clicks.out, 0: clicks.fit, n: () => walk(1, 0), p: () => walk(-1, 0),
    ArrowDown: () => walk(0, 1), ArrowUp: () => walk(0, -1),
  });
  let held = null;
  canvas.addEventListener("pointerdown", (e) => {
    held = [e.offsetX, ...view];
    picked = spanAt(e.offsetX, e.offsetY);
    tell(picked);
    drawTimeline();
  });
  canvas.addEventListener("pointermove", (e) => {
    if (!held) return tell(spanAt(e.offsetX, e.offsetY));
    const by = ((held[0] - e.offsetX) / canvas.clientWidth) * (held[2] - held[1]);
    show(held[1] + by, held[2] + by);
  });
  for (const end of ["pointerup", "pointerleave", "pointercancel"]) {
    canvas.addEventListener(end, () => { held = null; });
  }
  canvas.addEventListener("wheel", (e) => {
    if (!e.ctrlKey) return; // the page scrolls
    e.preventDefault();
    const at = view[0] + (e.offsetX / canvas.clientWidth) * (view[1] - view[0]);
    zoom(e.deltaY > 0 ? 1.25 : 0.8, at);
  }, { passive: false });
  onKeys("chunks", { ArrowLeft: () => walkChunks(-1), ArrowRight: () => walkChunks(1) });
  for (const when of ["pointerdown", "pointermove"]) {
    byId("chunks").addEventListener(when, (e) => tellChunk(chunkAt(e.offsetX, e.offsetY)));
  }
  byId("which").addEventListener("change", (e) => choose(Number(e.target.value)));
  byId("engine").addEventListener("change", drawMemory);
  addEventListener("resize", drawAll);
  dark.addEventListener("change", drawAll);
}

function fillIn() {
  const spans = data.lanes.flatMap((l) => l.spans);
  [first, last] = extentOf(spans);
  view = [first, last];
  for (const note of data.notes) make("p", note, byId("notes"), "warn");
  if (!data.collectives.length) make("p", "No collective is in this trace.", byId("notes"));
  byId("kindsPart").hidden = byId("chunkPart").hidden = !data.collectives.length;
  byId("memoryPart").hidden = !data.memory.length;
  const used = new Set(spans.map((s) => data.names[s[1]]));
  for (const category of Object.keys(COLORS)) {
    if (!used.has(category)) continue;
    const key = make("span", undefined, byId("legend"), "key");
    make("i", undefined, key).style.background = colorOf(category);
    key.append({ wait: "waiting", collective: "collective, not waited for" }[category] ?? category);
  }
  table("shares", ["rank", "total", "computes", "engine", "communicates", "hidden", "exposed",
    "waits for late ranks"], data.shares.map(({ rank, ...times }) =>
    [rank, ...Object.values(times).map(us)]));
  for (const m of data.memory) make("option", `rank ${m.rank}, stage ${m.stage}`, byId("engine"));
  const model = data.model, perByte = (t) => (t * 1e9).toFixed(3);
  byId("model").textContent = model === null ? data.ranks === 1 ? "One rank moves nothing: nothing is predicted."
    : "Nothing is predicted: for that all ranks must have ended a collective that moves something, " +
      "of an algorithm that is known."
    : `${us(model.call * 1e6)} a call; α ${us(model.alpha * 1e6)} a message; β ${perByte(model.beta)}, ` +
      `γ ${perByte(model.gamma)}, bus ${perByte(model.bus)} ns a byte` +
      model.caches.map(([end, more]) => `, ${perByte(more)} more on the bus after ${bytes(end)}`).join("") +
      `; ${model.source}.`;
  data.collectives.forEach((c, i) => {
    make("option", `${c.name} · ${c.algorithm} · ${bytes(c.bytes)} B · at ${us(c.begin - first)}`,
      byId("which")).value = i;
  });
}

async function unpack() {
  const packed = Uint8Array.from(atob(byId("data").textContent), (c) => c.charCodeAt(0));
  byId("state").textContent = `Unpacking ${bytes(packed.length)} bytes …`;
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  data = JSON.parse(await new Response(stream).text());
}

async function start() {
  await unpack();
  byId("state").textContent = `Drawing ${counted(data.collectives.length, "collective")} …`;
  await new Promise((shown) => setTimeout(shown)); // the line above is painted
  byId("main").hidden = false;
  fillIn();
  layOut();
  groupKinds();
  listen();
  drawAll();
  if (data.collectives.length) choose(largest());
  byId("state").textContent = `${counted(data.ranks, "rank")}, ${us(last - first)}, ` +
    `${counted(data.collectives.length, "collective")}, ` +
    `${counted(data.chunks.reduce((n, c) => n + c.length, 0), "chunk")}.`;
}

start().catch((error) => {
  byId("state").textContent = `This page cannot be shown: ${error}`;
  byId("state").className = "warn";
});
