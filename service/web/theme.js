// Light or dark: as the system has it, unless somebody said otherwise here.

const KEPT = "polyhead-theme";
const ORDER = ["system", "light", "dark"];

export function themed(button) {
  let theme = localStorage.getItem(KEPT) ?? "system";
  const show = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    localStorage.setItem(KEPT, theme);
    show();
  });
  show();
}
