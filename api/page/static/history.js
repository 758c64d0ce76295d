// Draws the last hour with uPlot, and says it in a sentence for those who do not see it.
const REFRESH_MS = 20000;
const place = document.getElementById("history");
const sentence = document.getElementById("history-text");
let chart = null;

function columns(points) {
  const at = [], ended = [], failed = [], queued = [];
  for (let i = 1; i < points.length; i++) {
    const [before, point] = [points[i - 1], points[i]];
    const minutes = (point.at - before.at) / 60;
    at.push(point.at);
    ended.push(Math.max(0, point.num_results - before.num_results) / minutes);
    failed.push(Math.max(0, point.num_failures - before.num_failures) / minutes);
    queued.push(point.num_queued);
  }
  return [at, ended, failed, queued];
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function draw(data) {
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
  const options = {
    width: place.clientWidth,
    height: 220,
    cursor: { y: false },
    scales: { jobs: { range: (_, low, high) => [0, Math.max(1, high)] }, y: { range: (_, low, high) => [0, Math.max(1, high)] } },
    axes: [axis, { ...axis, label: "jobs per minute" }, { ...axis, scale: "jobs", side: 1, label: "waiting jobs", grid: { show: false } }],
    series: [
      {},
      { label: "done per minute", stroke: color("--bar"), width: 2 },
      { label: "failed per minute", stroke: color("--bad"), width: 2, dash: [6, 3] },
      { label: "waiting", scale: "jobs", stroke: color("--quiet"), width: 1.5, dash: [2, 3] },
    ],
  };
  chart?.destroy();
  chart = new uPlot(options, data, place);
}

async function refresh() {
  const reply = await fetch(place.dataset.source);
  if (!reply.ok) return;
  const data = columns(await reply.json());
  if (data[0].length < 2) {
    sentence.textContent = "The chart begins a minute after the server.";
    return;
  }
  draw(data);
  const last = data.map((column) => column.at(-1));
  sentence.textContent = `Now ${last[1].toFixed(0)} jobs are done per minute, ${last[2].toFixed(0)} fail, and ${last[3]} wait.`;
}

refresh();
setInterval(refresh, REFRESH_MS);
addEventListener("resize", () => chart?.setSize({ width: place.clientWidth, height: 220 }));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
