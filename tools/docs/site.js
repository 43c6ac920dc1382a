// SPDX-License-Identifier: Apache-2.0
// The navigation of narrow windows, and the search: names of the reference, headings and text of the pages.
// search_index.js sets SEARCH_INDEX, a list of [name, kind, address, text].
"use strict";

const field = document.getElementById("search");
const results = document.getElementById("results");
const menu = document.getElementById("menu");
const navigation = document.getElementById("navigation");
const here = location.pathname.split("/").pop() || "index.html";

for (const link of navigation.querySelectorAll("a")) {
  if (link.getAttribute("href") === here) link.setAttribute("aria-current", "page");
}
menu.addEventListener("click", () => {
  menu.setAttribute("aria-expanded", String(navigation.classList.toggle("open")));
});

// The last part of an entry's name; nothing for pages, which stay in their order.
function last(entry) {
  return entry[1] === "page" ? "" : entry[0].slice(entry[0].lastIndexOf("::") + 1);
}

// How well an entry fits, the lower the better; -1 if it does not fit. `asked` is in lower case.
function rank(entry, asked) {
  const name = entry[0].toLowerCase();
  const last = name.slice(name.lastIndexOf("::") + (name.includes("::") ? 2 : 0));
  if (name === asked || name === "weft::" + asked) return 0;
  if (last === asked || name.endsWith("::" + asked)) return 1;
  if (last.startsWith(asked)) return 2;
  if (name.includes(asked)) return 3;
  const words = asked.split(/\s+/).filter(Boolean);
  const all = name + " " + entry[3].toLowerCase();
  if (words.length > 1 && words.every((word) => name.includes(word))) return 4;
  return words.every((word) => all.includes(word)) ? 5 : -1;
}

function search(text) {
  const asked = text.trim().toLowerCase().replace(/\(\)$/, "");
  if (!asked) return [];
  return SEARCH_INDEX.map((entry, place) => ({ entry, place, rank: rank(entry, asked), size: last(entry).length }))
    .filter((found) => found.rank >= 0)
    .sort((a, b) => a.rank - b.rank || a.size - b.size || a.place - b.place)
    .slice(0, 30)
    .map((found) => found.entry);
}

// A piece of the entry's text around the first word that was asked for.
function excerpt(text, asked) {
  const place = text.toLowerCase().indexOf(asked.trim().toLowerCase().split(/\s+/)[0]);
  const from = place > 40 ? text.indexOf(" ", place - 40) + 1 : 0;
  return (from > 0 ? "… " : "") + text.slice(from, from + 160);
}

function show() {
  const found = search(field.value);
  results.replaceChildren();
  results.hidden = !field.value.trim();
  for (const [name, kind, address, text] of found) {
    const link = document.createElement("a");
    link.href = address;
    link.className = kind === "page" ? "page" : "";
    const title = document.createElement("b");
    title.textContent = name;
    const about = document.createElement("small");
    about.textContent = kind + (text ? ": " + excerpt(text, field.value) : "");
    link.append(title, about);
    const item = document.createElement("li");
    item.append(link);
    results.append(item);
  }
  if (!found.length) {
    const none = document.createElement("li");
    none.className = "none";
    none.textContent = "Nothing found";
    results.append(none);
  } else {
    results.querySelector("a").classList.add("chosen");
  }
}

function move(step) {
  const links = [...results.querySelectorAll("a")];
  const now = links.findIndex((link) => link.classList.contains("chosen"));
  if (!links.length) return;
  const next = links[(now + step + links.length) % links.length];
  links[now]?.classList.remove("chosen");
  next.classList.add("chosen");
  next.scrollIntoView({ block: "nearest" });
}

field.addEventListener("input", show);
field.addEventListener("focus", show);
field.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    move(event.key === "ArrowDown" ? 1 : -1);
  } else if (event.key === "Enter") {
    results.querySelector("a.chosen")?.click();
  } else if (event.key === "Escape") {
    field.value = "";
    field.blur();
    show();
  }
});
results.addEventListener("click", (event) => {
  if (event.target.closest("a")) results.hidden = true;
});
document.addEventListener("click", (event) => {
  if (!event.target.closest(".search")) results.hidden = true;
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(input|textarea)$/i.test(document.activeElement.tagName)) {
    event.preventDefault();
    field.focus();
  }
});
