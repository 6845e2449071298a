// Hits and examples are links; clicked plainly they search at once, without loading the page again.
element.addEventListener("click", (event) => {
  const chosen = event.target.closest("[data-item], [data-text]");
  if (!chosen || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  trigger("click", { item: chosen.dataset.item ?? null, text: chosen.dataset.text ?? null });
});
watch("value", () => {
  if (!element.querySelector(".results")) return;
  const restore = element.querySelector("a.restore"); // a picture has none: it is kept nowhere
  history.replaceState(null, "", restore ? restore.getAttribute("href") : location.pathname);
});
