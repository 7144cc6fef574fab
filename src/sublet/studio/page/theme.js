/* Light, dark or as the system says: set before anything is drawn, so that nothing flashes. */
"use strict";
(() => {
  const NAMES = ["system", "light", "dark"];
  let theme = "system";
  try {
    theme = localStorage.getItem("sublet.theme") || theme;
  } catch {
    /* storage may be forbidden: then it is not kept */
  }
  const show = () => {
    if (!NAMES.includes(theme)) theme = "system";
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
  };
  show();
  addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme").addEventListener("click", () => {
      theme = NAMES[(NAMES.indexOf(theme) + 1) % NAMES.length];
      try {
        localStorage.setItem("sublet.theme", theme);
      } catch {
        /* as above */
      }
      show();
    });
  });
})();
