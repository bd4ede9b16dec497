"use strict";
(function () {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const AHEAD = "800px 0px"; // plots are drawn before they are in view
  const OPTIONS = {
    displaylogo: false,
    modeBarButtons: [["toImage"]],
    scrollZoom: false,
    doubleClick: false,
    showTips: false,
  };
  let isDark = dark.matches;

  function paint({ data, layout }) {
    const ink = isDark ? "#eceef0" : "#1a1c1f";
    const edge = isDark ? "#757c84" : "#9aa0a6";
    const colors = {
      gridcolor: isDark ? "#33383d" : "#e3e5e8",
      linecolor: edge,
      tickcolor: edge,
    };
    layout.font.color = ink;
    Object.assign(layout.hoverlabel, {
      bgcolor: isDark ? "#2a2e33" : "#ffffff",
      bordercolor: edge,
      font: { color: ink },
    });
    for (const note of layout.annotations || []) {
      if (note.bgcolor) note.bgcolor = isDark ? "#1b1e21" : "#ffffff";
    }
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(name)) Object.assign(layout[name], colors);
    }
    for (const trace of data) {
      if (trace.meta !== "ink") continue;
      trace.marker.color = isDark ? "#ffffff" : "#000000";
      trace.textfont = { color: trace.marker.color };
    }
  }

  function fit({ place, layout, square, high }) {
    layout.width = place.clientWidth;
    layout.height = square ? Math.round(Math.min(layout.width, 620) + 70) : high;
    place.style.minHeight = `${layout.height}px`;
  }

  function draw(plot) {
    if (plot.drawn) return;
    const { place, data, layout } = plot;
    plot.drawn = true;
    paint(plot);
    fit(plot);
    const image = { format: "svg", filename: place.id };
    Plotly.newPlot(place, data, layout, { ...OPTIONS, toImageButtonOptions: image });
    root.dataset.drawn = String(1 + Number(root.dataset.drawn));
  }

  function redraw(plot) {
    fit(plot);
    if (!plot.drawn) return;
    paint(plot);
    Plotly.react(plot.place, plot.data, plot.layout);
  }

  const plots = [...document.querySelectorAll("script[data-plot]")].map((source) => {
    const place = document.getElementById(source.dataset.plot);
    const { data, layout } = JSON.parse(source.textContent);
    const square = place.classList.contains("square");
    return { place, data, layout, square, high: layout.height, drawn: false };
  });

  let waiting = 0;
  window.addEventListener("resize", () => {
    window.cancelAnimationFrame(waiting);
    waiting = window.requestAnimationFrame(() => plots.forEach(redraw));
  });
  dark.addEventListener("change", () => {
    isDark = dark.matches && !root.classList.contains("printing");
    plots.forEach(redraw);
  });

  let opened = [];
  window.addEventListener("beforeprint", () => {
    if (root.classList.contains("printing")) return;
    opened = [...document.querySelectorAll("details:not([open]):not(.bulky)")]
      .filter((item) => Number(item.dataset.rows) <= 45);
    opened.forEach((item) => { item.open = true; });
    root.classList.add("printing");
    isDark = false;
    plots.forEach(redraw);
    plots.forEach(draw);
  });
  window.addEventListener("afterprint", () => {
    opened.forEach((item) => { item.open = false; });
    root.classList.remove("printing");
    isDark = dark.matches;
    plots.forEach(redraw);
  });

  root.dataset.drawn = "0";
  plots.forEach(fit);
  if ("IntersectionObserver" in window) {
    const byPlace = new Map(plots.map((plot) => [plot.place, plot]));
    const near = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        near.unobserve(target);
        draw(byPlace.get(target));
      }
    }, { rootMargin: AHEAD });
    for (const { place } of plots) near.observe(place);
  } else {
    plots.forEach(draw);
  }
})();
