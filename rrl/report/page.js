// List, filters and keyboard control for a page of trajectories. Without this script the page shows all of them, one below the
// other.
"use strict";
const slots = [...document.querySelectorAll(".slot")];
const links = [...document.querySelectorAll("#list a")];
const form = document.querySelector("#filters");
let current = -1;
let loaded = false;  // true after the first `show`, which must not change the address

function matching() {
  const fields = [...form.querySelectorAll("select")].filter((box) => box.value);
  const words = form.querySelector("input").value.toLowerCase().split(/\s+/).filter(Boolean);
  return slots.map((slot) =>
    fields.every((box) => slot.dataset[box.dataset.field] === box.value) &&
    words.every((word) => slot.dataset.words.includes(word)));
}

function show(at) {
  current = at;
  slots.forEach((slot, index) => { slot.hidden = index !== at; });
  links.forEach((link, index) => link.classList.toggle("on", index === at));
  document.querySelector("main").scrollTop = 0;
  document.querySelector("#none").hidden = at >= 0;
  if (at >= 0) {
    reveal(links[at]);
    if (loaded) history.replaceState(null, "", "#t" + at);
  }
}

// Scrolls only the list, because the list may be below a report that the user is reading.
function reveal(link) {
  const list = link.parentElement;
  const top = link.offsetTop - list.offsetTop;
  list.scrollTop = Math.min(Math.max(list.scrollTop, top + link.offsetHeight - list.clientHeight), top);
}

function filter() {
  const fits = matching();
  links.forEach((link, index) => { link.hidden = !fits[index]; });
  const count = fits.filter(Boolean).length;
  form.querySelector("output").value = count === slots.length ? "" : count + " of " + slots.length;
  show(current >= 0 && fits[current] ? current : fits.indexOf(true));
}

function step(by) {
  const visible = links.flatMap((link, index) => (link.hidden ? [] : [index]));
  const next = visible[visible.indexOf(current) + by];
  if (next !== undefined) show(next);
}

form.addEventListener("input", filter);
form.addEventListener("submit", (event) => event.preventDefault());
document.querySelector("#list").addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link) return;
  event.preventDefault();
  show(Number(link.dataset.at));
});
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, select")) return;
  if (event.key === "j" || event.key === "ArrowRight") step(1);
  if (event.key === "k" || event.key === "ArrowLeft") step(-1);
});
current = Math.min(Math.max(parseInt(location.hash.slice(2)) || 0, 0), slots.length - 1);
filter();
loaded = true;
