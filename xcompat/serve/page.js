"use strict";
const byId = (id) => document.getElementById(id);
const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`)?.value;
const pause = (seconds) => new Promise((resolve) => { setTimeout(resolve, seconds * 1000); });

// ------------------------------------------------------------------------------------------------ requests

async function post(path, body, signal) {
  const isImage = body instanceof Blob;
  const headers = { "Content-Type": isImage ? "application/octet-stream" : "application/json" };
  for (let attempt = 1; ; attempt += 1) {
    const answer = await fetch(path, { method: "POST", headers, body: isImage ? body : JSON.stringify(body), signal });
    if (answer.ok) return answer;
    if (answer.status === 401) location.reload();
    const line = await answer.text();
    if (![429, 503].includes(answer.status) || attempt === 5) throw new Error(line);
    await pause(Number(answer.headers.get("Retry-After") ?? 1) * attempt);
  }
}

function alertIn(place, line) {
  const shown = document.createElement("p");
  shown.className = "alert";
  shown.setAttribute("role", "alert");
  shown.textContent = line;
  place.replaceChildren(shown);
}

// The newest request of a place wins: those before it are given up.
const newest = new Map();
async function show(place, path, body) {
  newest.get(place)?.abort();
  const current = new AbortController();
  newest.set(place, current);
  place.setAttribute("aria-busy", "true");
  try {
    const html = await (await post(path, body, current.signal)).text();
    if (current.signal.aborted) return false;
    place.innerHTML = html; // of the server's templates, which escape all texts
    return true;
  } catch (error) {
    if (!current.signal.aborted) alertIn(place, error.name === "TypeError" ? "the server does not answer" : error.message);
    return false;
  } finally {
    if (newest.get(place) === current) place.removeAttribute("aria-busy");
  }
}

// ------------------------------------------------------------------------------------------------ tabs

const tabs = [...document.querySelectorAll("[role=tab]")];
const opened = {
  differing: () => showDiffering(),
  numbers: () => showReport(),
  gallery: () => lookAtGallery(),
};

function select(tab) {
  for (const each of tabs) {
    const isSelected = each === tab;
    each.setAttribute("aria-selected", String(isSelected));
    each.tabIndex = isSelected ? 0 : -1;
    byId(each.getAttribute("aria-controls")).hidden = !isSelected;
  }
  opened[tab.getAttribute("aria-controls")]?.();
}

for (const [place, tab] of tabs.entries()) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(place + step + tabs.length) % tabs.length];
    next.focus();
    select(next);
  });
}

// ------------------------------------------------------------------------------------------------ search

const results = byId("results");
let image = null;

function filters() {
  return [...document.querySelectorAll("#filters [data-filter]")].map((chip) => chip.dataset.filter);
}

function hits() {
  const k = byId("k");
  const value = Math.round(Number(k.value));
  if (!(value >= Number(k.min) && value <= Number(k.max))) k.value = Math.min(Math.max(value || 1, Number(k.min)), Number(k.max));
  return Math.round(Number(k.value));
}

async function search() {
  const kind = chosen("kind");
  const asked = { gallery: byId("shelf").value, where: filters(), k: hits(), rerank: byId("rerank").checked };
  let isDone;
  if (kind === "image") {
    const limit = Number(byId("image").dataset.limit);
    if (image && image.size > limit) { alertIn(results, `the image is larger than ${(limit / 1e6).toFixed(1)} MB; make it smaller`); return; }
    const parameters = new URLSearchParams([["gallery", asked.gallery], ["k", asked.k], ["rerank", asked.rerank], ...asked.where.map((filter) => ["where", filter])]);
    isDone = await show(results, `/api/search/image?${parameters}`, image ?? new Blob());
  } else {
    isDone = await show(results, "/api/search", { ...asked, kind, [kind]: byId(kind).value });
  }
  if (!isDone) return;
  const restore = results.querySelector("a.restore"); // an image has none: it is kept nowhere
  history.replaceState(null, "", restore ? restore.getAttribute("href") : location.pathname);
}

function hasQuery() {
  const kind = chosen("kind");
  return kind === "image" ? image !== null : byId(kind).value !== "";
}

function searchAgain() {
  if (hasQuery()) search();
}

function choose(kind) {
  document.querySelector(`input[name="kind"][value="${kind}"]`).checked = true;
  for (const field of document.querySelectorAll("[data-kind]")) field.hidden = field.dataset.kind !== kind;
}

function take(file) {
  if (!file) return;
  image = file;
  search();
}

function addFilter() {
  const filter = byId("filter").value.trim();
  byId("filter").value = "";
  if (!filter || filters().includes(filter)) return false;
  const chip = document.createElement("button");
  chip.type = "button";
  chip.className = "chip";
  chip.dataset.filter = filter;
  chip.setAttribute("aria-label", `remove the filter ${filter}`);
  chip.textContent = filter;
  byId("filters").append(chip);
  return true;
}

async function offerFilters() {
  let offered = [];
  try {
    offered = await (await post("/api/filters", { gallery: byId("shelf").value })).json();
  } catch { /* a filter can be typed */ }
  byId("facets").replaceChildren(...offered.map((filter) => {
    const option = document.createElement("option");
    option.value = filter;
    return option;
  }));
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  addFilter();
  search();
});
byId("kinds").addEventListener("change", () => choose(chosen("kind")));
byId("filter").addEventListener("change", () => { if (addFilter()) searchAgain(); });
byId("filter").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  if (addFilter()) searchAgain();
});
byId("filters").addEventListener("click", (event) => {
  const chip = event.target.closest("[data-filter]");
  if (!chip) return;
  chip.remove();
  byId("filter").focus();
  searchAgain();
});
byId("k").addEventListener("change", searchAgain);
byId("rerank").addEventListener("change", searchAgain);
byId("shelf").addEventListener("change", () => {
  byId("filters").replaceChildren();
  offerFilters();
});
byId("image").addEventListener("change", (event) => take(event.target.files[0]));
byId("drop").addEventListener("dragover", (event) => event.preventDefault());
byId("drop").addEventListener("drop", (event) => {
  event.preventDefault();
  take(event.dataTransfer.files[0]);
});
document.addEventListener("paste", (event) => { if (byId("drop").offsetParent) take(event.clipboardData.files[0]); });
// Hits and examples are links; clicked plainly they search at once, without loading the page again.
results.addEventListener("click", (event) => {
  const target = event.target.closest("[data-item], [data-text]");
  if (!target || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const kind = target.dataset.item === undefined ? "text" : "item";
  choose(kind);
  byId(kind).value = target.dataset[kind];
  search();
});
offerFilters();
if (location.search) searchAgain();

// ------------------------------------------------------------------------------------------------ queries that differ

function showDiffering() {
  const page = Math.min(Math.max(Math.round(Number(byId("number").value)) || 1, 1), 1e9);
  return show(byId("differing-queries"), "/api/differing", { direction: chosen("direction"), order: chosen("order"), page });
}

async function turn(step) {
  byId("number").value = Math.max(1, (Number(byId("number").value) || 1) + step);
  await showDiffering();
  const shown = document.querySelector(".flips");
  if (shown) byId("number").value = shown.dataset.page;
}

if (byId("differing")) {
  byId("number").addEventListener("change", () => turn(0));
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  for (const choice of document.querySelectorAll("[name=direction], [name=order]")) {
    choice.addEventListener("change", () => {
      byId("number").value = 1;
      showDiffering();
    });
  }
}

// ------------------------------------------------------------------------------------------------ report

function showReport() {
  if (document.querySelector("#numbers iframe")) return;
  const frame = document.createElement("iframe");
  frame.className = "report-frame";
  frame.title = "report";
  frame.setAttribute("sandbox", "");
  frame.src = "/report";
  frame.addEventListener("load", () => document.querySelector("#numbers > p")?.remove());
  byId("numbers").append(frame);
}

// ------------------------------------------------------------------------------------------------ galleries

async function lookAtGallery() {
  if (!await show(byId("about"), "/api/gallery", { gallery: byId("looked-at").value })) return;
  const generations = byId("about").querySelectorAll("[data-generation]");
  byId("generation")?.replaceChildren(...[...generations].map((state) => new Option(state.dataset.generation)).slice(1));
}

function showButtonsOfRollback(isAsking) {
  byId("ask-rollback").hidden = isAsking;
  document.querySelector("[data-verb=rollback]").hidden = !isAsking;
  byId("keep").hidden = !isAsking;
}

async function work(button) {
  const said = byId("said");
  const { verb, dry } = button.dataset;
  const asked = { gallery: byId("looked-at").value, verb, dry_run: dry !== undefined };
  if (verb === "doctor") asked.side = byId("side").value;
  if (verb === "backfill") asked.budget = Math.max(1, Math.round(Number(byId("budget").value)) || 1);
  if (verb === "rollback" && byId("generation").value) asked.generation = Number(byId("generation").value);
  button.disabled = true;
  try {
    const { job } = await (await post("/api/work", asked)).json();
    for (;;) {
      const state = await (await post("/api/job", { job })).json();
      const line = document.createElement("pre");
      line.className = "said";
      line.tabIndex = 0;
      line.setAttribute("role", state.failed ? "alert" : "status");
      line.textContent = state.said;
      said.replaceChildren(line);
      if (state.done) break;
      await pause(0.5);
    }
  } catch (error) {
    alertIn(said, error.message);
  } finally {
    button.disabled = false;
  }
  if (verb === "rollback") showButtonsOfRollback(false);
  await lookAtGallery();
}

byId("looked-at").addEventListener("change", lookAtGallery);
for (const button of document.querySelectorAll("[data-verb]")) button.addEventListener("click", () => work(button));
byId("ask-rollback")?.addEventListener("click", () => showButtonsOfRollback(true));
byId("keep")?.addEventListener("click", () => showButtonsOfRollback(false));
