"use strict";
(function () {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const plots = [];

  function theme(layout, isDark) {
    const ink = isDark ? "#eceef0" : "#1a1c1f";
    const grid = isDark ? "#33383d" : "#e3e5e8";
    const edge = isDark ? "#757c84" : "#9aa0a6";
    const changes = {
      "font.color": ink,
      "hoverlabel.bgcolor": isDark ? "#2a2e33" : "#ffffff",
      "hoverlabel.bordercolor": edge,
      "hoverlabel.font.color": ink,
    };
    (layout.annotations || []).forEach((note, index) => {
      if (note.bgcolor) changes[`annotations[${index}].bgcolor`] = isDark ? "#1b1e21" : "#ffffff";
    });
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(name)) {
        changes[name + ".gridcolor"] = grid;
        changes[name + ".linecolor"] = edge;
        changes[name + ".tickcolor"] = edge;
      }
    }
    return changes;
  }

  function paint(isDark) {
    for (const { place, layout, ink } of plots) {
      if (ink.length) {
        const color = isDark ? "#ffffff" : "#000000";
        Plotly.restyle(place, { "marker.color": color, "textfont.color": color }, ink);
      }
      Plotly.relayout(place, theme(layout, isDark));
    }
  }

  function height(place, layout) {
    if (!place.classList.contains("square")) return layout.height;
    return Math.round(Math.min(place.clientWidth, 620) + 70);
  }

  for (const source of document.querySelectorAll("script[data-plot]")) {
    const place = document.getElementById(source.dataset.plot);
    const spec = JSON.parse(source.textContent);
    const ink = [];
    spec.data.forEach((trace, index) => { if (trace.meta === "ink") ink.push(index); });
    spec.layout.height = height(place, spec.layout);
    place.style.minHeight = "0";
    Plotly.newPlot(place, spec.data, spec.layout, {
      displaylogo: false,
      modeBarButtons: [["toImage"]],
      toImageButtonOptions: { format: "svg", filename: source.dataset.plot },
      scrollZoom: false,
      doubleClick: false,
      showTips: false,
    });
    plots.push({ place, layout: spec.layout, ink });
  }

  function fit() {
    for (const { place, layout } of plots) {
      Plotly.relayout(place, { width: place.clientWidth, height: height(place, layout) });
    }
  }

  let waiting = 0;
  window.addEventListener("resize", () => {
    window.cancelAnimationFrame(waiting);
    waiting = window.requestAnimationFrame(fit);
  });
  dark.addEventListener("change", () => paint(dark.matches));

  let opened = [];
  window.addEventListener("beforeprint", () => {
    if (document.documentElement.classList.contains("printing")) return;
    opened = [...document.querySelectorAll("details:not([open]):not(.bulky)")]
      .filter((item) => Number(item.dataset.rows) <= 45);
    opened.forEach((item) => { item.open = true; });
    document.documentElement.classList.add("printing");
    paint(false);
    fit();
  });
  window.addEventListener("afterprint", () => {
    opened.forEach((item) => { item.open = false; });
    document.documentElement.classList.remove("printing");
    paint(dark.matches);
    fit();
  });

  paint(dark.matches);
  fit();
  document.documentElement.dataset.drawn = String(plots.length);
})();
