// Shows /admin/state, asked for each second. Whatever came from clients, replicas or manifests is
// put in as text; the page's Content Security Policy allows nothing else.

const POLL_MS = 1000;
const ANSWER_MS = 5000;
const RATE_POLLS = 10;
const NUM_DECISIONS = 20;
const TOKEN_KEY = "cartridge-router-token";
const NUM_TERM_COLOURS = 6;

const byId = (id) => document.getElementById(id);
let token = sessionStorage.getItem(TOKEN_KEY);
let timer = null;
let isAsking = false;
let answeredAt = null;
let mustShowAll = false;
let last = null;
const polls = [];
const termNames = ["queue", "load", "prefill", "interference", "copy"];
const drawn = new Map();
const decisionNodes = new Map();

// --- making nodes -------------------------------------------------------------------------------
function make(tag, { className, text, title, ...attributes } = {}, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (title) node.title = title;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const cell = (className, ...children) => make("td", { className }, ...children);
const badge = (kind, text, title) => make("span", { className: `badge ${kind}`, text, title });

function gauge(value, most) {
  const bar = make("span");
  bar.style.width = `${most > 0 ? (100 * value) / most : 0}%`;
  const track = make("span", { className: "track", "aria-hidden": "true" }, bar);
  return make("div", { className: "gauge" }, make("b", { text: String(value) }), track);
}

// --- words and numbers --------------------------------------------------------------------------
function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value >= 120) return `${Math.floor(value / 60)} min`;
  if (value >= 10) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
}

function duration(value) {
  if (value < 7200) return seconds(value);
  return value < 172800 ? `${Math.floor(value / 3600)} h` : `${Math.floor(value / 86400)} days`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit === 0 || value >= 100 ? 0 : 1)} ${units[unit]}`;
}

const clock = (date) => date.toTimeString().slice(0, 8);
const leftOut = (count, what) => (count > 0 ? `${count} more ${what} are not shown` : "");

// --- the sections -------------------------------------------------------------------------------
// Draws a section anew where what it shows has changed.
function redraw(name, value, draw) {
  const text = JSON.stringify(value);
  if (drawn.get(name) === text) return;
  draw(value);
  drawn.set(name, text);
}

function fact(name, ...value) {
  return make("div", {}, make("dt", { text: name }), make("dd", {}, ...value));
}

function drawFacts(state) {
  const { requests, in_flight: inFlight, queued } = state.totals;
  const total = Object.values(requests).reduce((sum, count) => sum + count, 0);
  if (polls.length && polls.at(-1).uptimeS > state.uptime_s) polls.length = 0;
  if (!polls.length || polls.at(-1).uptimeS < state.uptime_s) {
    polls.push({ uptimeS: state.uptime_s, total });
  }
  if (polls.length > RATE_POLLS) polls.shift();
  const [oldest, newest] = [polls[0], polls.at(-1)];
  const elapsedS = newest.uptimeS - oldest.uptimeS;
  const rate = elapsedS > 0 ? ((newest.total - oldest.total) / elapsedS).toFixed(1) : "–";
  const kinds = { exact: "good", degraded: "wary", fallback: "bad" };
  const { mode, age_s: ageS } = state.map;
  const age = ageS === null ? "never read" : `${seconds(ageS)} old`;
  const facts = [
    fact("map", badge(kinds[mode] ?? "", mode), ` ${age}`),
    fact("requests/s", rate),
    fact("in flight", String(inFlight)),
    fact("waiting", String(queued)),
    ...Object.entries(requests).map(([kind, count]) => fact(kind, String(count))),
    fact("policy", state.policy),
    fact("up", duration(state.uptime_s)),
  ];
  if (state.is_draining) facts.unshift(fact("gateway", badge("wary", "draining")));
  byId("facts").replaceChildren(...facts);
}

function health(replica) {
  if (replica.status === "taken_out") return badge("", "taken out");
  if (replica.status === "leaving") return badge("wary", "leaving");
  if (!replica.is_healthy) return badge("bad", "✕ unhealthy");
  if (replica.left_alone) {
    return make("div", {}, badge("wary", "◐ left alone"), make("small", { text: replica.left_alone }));
  }
  return badge("good", "✓ healthy");
}

function ability(replica) {
  if (replica.is_draining) return "draining";
  if (replica.is_registered) return "registered";
  if (replica.has_extension === null) return "not registered";
  return replica.has_extension ? "extension found" : "no extension";
}

function held(replica) {
  if (replica.used_bytes === null) return [make("span", { className: "faint", text: "not on the map" })];
  const tiers = Object.entries(replica.used_bytes).filter(([, count]) => count > 0);
  if (!tiers.length) return [make("span", { className: "faint", text: "nothing" })];
  return tiers.map(([tier, count]) =>
    make("span", {}, make("span", { className: `tier ${tier}`, text: tier }), bytes(count)),
  );
}

function drawReplicas({ data, left_out: count }) {
  const most = Math.max(4, ...data.map((replica) => replica.num_in_flight));
  const rows = data.map((replica) => {
    const more = replica.models_left_out > 0 ? ` and ${replica.models_left_out} more` : "";
    return make(
      "tr",
      {},
      make("th", { scope: "row", text: replica.name }, make("small", { text: replica.url })),
      cell("", health(replica)),
      cell("", gauge(replica.num_in_flight, most)),
      cell("", ability(replica), make("small", { text: replica.engine_version ?? "" })),
      cell("held", ...held(replica)),
      cell("", replica.models.join(", ") + more),
      cell("", replica.source),
    );
  });
  const none = make("tr", {}, make("td", { className: "empty", colspan: 7, text: "There are none." }));
  const table = byId("replicas");
  table.tBodies[0].replaceChildren(...(rows.length ? rows : [none]));
  table.parentElement.nextElementSibling.textContent = leftOut(count, "replicas");
}

function drawCartridges({ cartridges, mode }) {
  const { data, replicas, left_out: count, window_s: windowS } = cartridges;
  const column = (text, className) => make("th", { scope: "col", text, className });
  const head = make(
    "tr",
    {},
    column("Cartridge"),
    column("Tokens", "number"),
    column("Size", "number"),
    column(`Requests in ${seconds(windowS)}`),
    ...replicas.map((name) => column(name)),
  );
  const most = Math.max(1, ...data.map((cartridge) => cartridge.num_requests));
  const missing = mode === "fallback" ? ["unknown", "?"] : ["remote", "remote"];
  const rows = data.map((cartridge) =>
    make(
      "tr",
      {},
      make(
        "th",
        { scope: "row", text: cartridge.alias, title: cartridge.digest },
        make("small", { text: cartridge.title }),
      ),
      make("td", { className: "number", text: String(cartridge.num_tokens) }),
      make("td", { className: "number", text: bytes(cartridge.size_bytes) }),
      cell("", gauge(cartridge.num_requests, most)),
      ...cartridge.tiers.map((tier) => {
        const [kind, text] = tier === null ? missing : [tier, tier];
        return cell("", make("span", { className: `tier ${kind}`, text }));
      }),
    ),
  );
  const width = 4 + replicas.length;
  const none = make("tr", {}, make("td", { className: "empty", colspan: width, text: "There are none." }));
  const table = byId("cartridges");
  table.tHead.replaceChildren(head);
  table.tBodies[0].replaceChildren(...(rows.length ? rows : [none]));
  table.parentElement.nextElementSibling.textContent = leftOut(count, "Cartridges");
}

function termClass(name) {
  if (!termNames.includes(name)) termNames.push(name);
  return `term-${termNames.indexOf(name) % NUM_TERM_COLOURS}`;
}

function drawTerms(names) {
  byId("terms").replaceChildren(
    ...names.map((name) =>
      make("li", {}, make("span", { className: `swatch ${termClass(name)}`, "aria-hidden": "true" }), ` ${name}`),
    ),
    make("li", { text: "predicted time to the first token; the bars of one decision share a scale" }),
  );
}

function candidateNode(candidate, isChosen, most) {
  const terms = Object.entries(candidate.terms);
  const text = terms.map(([name, value]) => `${name} ${seconds(value)}`).join(" + ");
  const parts = terms.map(([name, value]) => {
    const part = make("span", { className: termClass(name) });
    part.style.width = `${most > 0 ? (100 * value) / most : 0}%`;
    return part;
  });
  const tiers = candidate.tiers.length ? ` (${candidate.tiers.join(", ")})` : "";
  const name = `${isChosen ? "▶ " : ""}${candidate.replica}${tiers}`;
  return make(
    "li",
    { className: isChosen ? "chosen" : "" },
    make("span", { className: "name", text: name, title: isChosen ? "chosen" : "" }),
    make("span", { className: "stack", role: "img", "aria-label": text }, ...parts),
    make("span", { className: "number", text: seconds(candidate.total_s) }),
    make("span", { className: "terms faint", text }),
  );
}

function statusBadge({ status, reason }) {
  if (status === null) return badge("", reason === null ? "waits for room" : "running");
  if (status === 499) return badge("wary", "499 client left");
  return badge(status < 400 ? "good" : status < 500 ? "wary" : "bad", String(status));
}

function decisionNode(decision) {
  const more = decision.cartridges_left_out > 0 ? ` and ${decision.cartridges_left_out} more` : "";
  const cartridges = decision.cartridges.length ? decision.cartridges.join(" + ") + more : "no Cartridge";
  const said = [
    make("span", { className: "faint", text: clock(new Date(decision.at_s * 1000)), title: decision.request_id }),
    statusBadge(decision),
    make("b", { text: `${cartridges} → ${decision.replica ?? "nowhere"}` }),
  ];
  if (decision.reason !== null) said.push(make("span", { text: decision.reason }));
  if (decision.queued_s !== null) said.push(badge("wary", `waited ${seconds(decision.queued_s)}`));
  if (decision.num_retries > 0) said.push(badge("wary", `${decision.num_retries} retried`));
  if (decision.problem !== null) said.push(make("span", { className: "faint", text: decision.problem }));
  const asked = [decision.route, decision.model, decision.tenant].filter(Boolean).join(" · ");
  said.push(
    make("span", { className: "faint", text: asked }),
    make("span", { className: "end", text: `first byte ${seconds(decision.first_byte_s)}` }),
  );
  const most = Math.max(0, ...decision.candidates.map((candidate) => candidate.total_s));
  const candidates = decision.candidates.map((candidate, index) => candidateNode(candidate, index === 0, most));
  if (decision.candidates_left_out > 0) {
    const text = `${decision.candidates_left_out} more replicas, later ones`;
    candidates.push(make("li", { className: "faint", text }));
  }
  return make(
    "li",
    {},
    make("div", { className: "said" }, ...said),
    make("ul", { className: "candidates" }, ...candidates),
  );
}

function drawDecisions({ data }) {
  const shown = mustShowAll ? data : data.slice(0, NUM_DECISIONS);
  const kept = new Set(shown.map((decision) => decision.request_id));
  for (const id of decisionNodes.keys()) if (!kept.has(id)) decisionNodes.delete(id);
  const nodes = shown.map((decision) => {
    const text = JSON.stringify(decision);
    const known = decisionNodes.get(decision.request_id);
    if (known?.text === text) return known.node;
    const node = decisionNode(decision);
    decisionNodes.set(decision.request_id, { text, node });
    return node;
  });
  const none = make("li", { className: "empty", text: "No request has come yet." });
  byId("decisions").replaceChildren(...(nodes.length ? nodes : [none]));
  const more = byId("more");
  more.hidden = data.length <= NUM_DECISIONS;
  more.textContent = mustShowAll ? `Show ${NUM_DECISIONS}` : `Show all ${data.length}`;
}

function draw(state) {
  last = state;
  drawFacts(state);
  redraw("replicas", state.replicas, drawReplicas);
  redraw("cartridges", { cartridges: state.cartridges, mode: state.map.mode }, drawCartridges);
  redraw("decisions", state.decisions, drawDecisions);
  redraw("terms", termNames, drawTerms);
}

// --- asking -------------------------------------------------------------------------------------
function say(kind, text) {
  const live = byId("live");
  // Said aloud by screen readers, so only where it changes.
  if (live.textContent !== text) live.textContent = text;
  live.className = `badge ${kind}`;
}

function askForToken(refusal) {
  token = null;
  sessionStorage.removeItem(TOKEN_KEY);
  byId("main").hidden = byId("facts").hidden = true;
  byId("login").hidden = false;
  byId("refused").textContent = refusal;
  say("", "locked");
  byId("token").focus();
}

async function ask() {
  const answer = await fetch("admin/state", {
    headers: token === null ? {} : { Authorization: `Bearer ${token}` },
    redirect: "error",
    signal: AbortSignal.timeout(ANSWER_MS),
  });
  if (answer.status === 401) {
    askForToken("This token is not the one.");
    return;
  }
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  draw(await answer.json());
  answeredAt = new Date();
  byId("login").hidden = true;
  byId("main").hidden = byId("facts").hidden = false;
  say("good", "live");
}

async function poll() {
  clearTimeout(timer);
  const isLocked = !byId("login").hidden && token === null;
  if (isAsking || isLocked || document.hidden) return;
  isAsking = true;
  try {
    await ask();
  } catch (error) {
    const since = answeredAt === null ? "the start" : clock(answeredAt);
    say("bad", `stale since ${since}: the gateway does not answer (${error.message})`);
  } finally {
    isAsking = false;
    timer = setTimeout(poll, POLL_MS);
  }
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = byId("token").value.trim();
  byId("token").value = "";
  if (!/^[!-~]+$/.test(typed)) {
    askForToken("A token has visible ASCII characters only.");
    return;
  }
  token = typed;
  sessionStorage.setItem(TOKEN_KEY, token);
  poll();
});
byId("more").addEventListener("click", () => {
  mustShowAll = !mustShowAll;
  drawDecisions(last.decisions);
});
document.addEventListener("visibilitychange", poll);

if (document.documentElement.dataset.token === "needed" && token === null) askForToken("");
else poll();
