"use strict";
const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");
const button = document.getElementById("theme");

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
}

function label() {
  button.textContent = isDark() ? "Light" : "Dark";
  button.setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colours`);
}

button.hidden = false;
button.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  label();
});
system.addEventListener("change", label);
label();

// Layers: focus shows the panel where it stands, a click also goes there.
const cells = [...document.querySelectorAll(".map a")];

function show(id) {
  for (const cell of cells) cell.classList.toggle("shown", cell.hash === `#${id}`);
  for (const panel of document.querySelectorAll(".panel")) {
    panel.classList.toggle("shown", panel.id === id);
  }
}

if (cells.length) {
  document.querySelector(".panels").classList.add("scripted");
  for (const cell of cells) cell.addEventListener("focus", () => show(cell.hash.slice(1)));
  show(cells[0].hash.slice(1));
}

// A link to something folded opens it.
function open() {
  const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  if (!target) return;
  if (target.matches("details")) target.open = true;
  if (target.matches(".panel")) show(target.id);
  target.scrollIntoView();
}

addEventListener("hashchange", open);
open();

// A rule under the pointer lights up its lines.
for (const rule of document.querySelectorAll(".by-rule")) {
  const lines = [...rule.closest(".site").querySelectorAll("[data-rules]")].filter((line) =>
    line.dataset.rules.split(" ").includes(rule.dataset.rule),
  );
  rule.addEventListener("mouseenter", () => lines.forEach((x) => x.classList.add("lit")));
  rule.addEventListener("mouseleave", () => lines.forEach((x) => x.classList.remove("lit")));
}
