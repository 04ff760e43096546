// The page: its charts, the theme, and updates of a live page.

const charts = new Map();
const POLL_MS = 2000;

function drawChart(figure) {
  if (!charts.has(figure.dataset.chart)) charts.set(figure.dataset.chart, new Chart(figure));
}

const drawAll = (root) => root.querySelectorAll("[data-chart]").forEach(drawChart);

// Marks the current section in the navigation bar.
const sections = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    for (const link of document.querySelectorAll("nav a")) {
      link.toggleAttribute("aria-current", link.hash === `#${target.id}`);
    }
  }
}, { rootMargin: "-30% 0px -65% 0px" });

// Light, dark or system theme, stored if the browser allows it.
const THEMES = ["system", "light", "dark"];
const memory = {
  get: () => { try { return localStorage.getItem("codistill-theme"); } catch { return null; } },
  set: (theme) => { try { localStorage.setItem("codistill-theme", theme); } catch { /* a page from a file may not */ } },
};

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const button = document.getElementById("theme");
  button.querySelector("span").textContent = theme;
  button.setAttribute("aria-label", `Colours: ${theme}`);
}

document.getElementById("theme").onclick = () => {
  const now = document.documentElement.dataset.theme;
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  setTheme(next);
  memory.set(next);
};

// Updates: the server renders the page again, and changed parts are replaced. Zoom, legends and folds stay.
function renewChart(old, fresh) {
  const chart = charts.get(old.dataset.chart);
  const spec = fresh.querySelector("script").textContent;
  if (old.querySelector("script").textContent === spec) return;
  old.querySelector("script").textContent = spec;
  old.querySelector(".summary").textContent = fresh.querySelector(".summary").textContent;
  old.querySelector(".numbers-table").replaceChildren(...fresh.querySelector(".numbers-table").childNodes);
  chart?.update(JSON.parse(spec));
}

const outline = (root) => [...root.querySelectorAll("[data-chart], [data-part]")]
  .map((node) => node.dataset.chart ?? node.dataset.part).join(" ");

function renewSection(old, fresh) {
  if (outline(old) !== outline(fresh)) {
    for (const figure of old.querySelectorAll("[data-chart]")) charts.delete(figure.dataset.chart);
    const open = new Set([...old.querySelectorAll("details[open]")].map((fold) => fold.id));
    for (const fold of fresh.querySelectorAll(".fold")) fold.open = open.has(fold.id) || fold.open;
    old.replaceChildren(...fresh.childNodes);
    drawAll(old);
    return;
  }
  for (const part of fresh.querySelectorAll("[data-part]")) {
    const now = old.querySelector(`[data-part="${CSS.escape(part.dataset.part)}"]`);
    if (now.innerHTML !== part.innerHTML) now.replaceChildren(...part.childNodes);
  }
  for (const figure of fresh.querySelectorAll("[data-chart]")) {
    renewChart(old.querySelector(`[data-chart="${CSS.escape(figure.dataset.chart)}"]`), figure);
  }
}

function renew(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  for (const section of fresh.querySelectorAll("main > section, [data-part=title]")) {
    const old = section.id ? document.getElementById(section.id) : document.querySelector("[data-part=title]");
    section.id ? renewSection(old, section) : old.replaceChildren(...section.childNodes);
  }
  document.title = fresh.title;
}

async function listen() {
  const pulse = document.getElementById("pulse");
  let version = "";
  for (;;) {
    if (!document.hidden) {
      try {
        const answer = await fetch(`news?since=${version}`);
        if (answer.status === 200) {
          renew(await answer.text());
          pulse.textContent = `live, news of ${new Date().toLocaleTimeString()}`;
        } else if (!answer.ok) throw new Error(answer.statusText);
        version = answer.headers.get("Codistill-Version") ?? version;
        pulse.classList.remove("lost");
      } catch {
        pulse.textContent = "codistill watch does not answer; trying again";
        pulse.classList.add("lost");
      }
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

setTheme(memory.get() ?? "system");
drawAll(document);
document.querySelectorAll("main > section").forEach((section) => sections.observe(section));
if ("live" in document.body.dataset) listen();
