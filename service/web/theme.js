// The colour scheme: the system's, or the one selected by the button.

const STORAGE_KEY = "polyhead-theme";
const THEMES = ["system", "light", "dark"];

export function connectThemeButton(button) {
  let theme = localStorage.getItem(STORAGE_KEY) ?? "system";
  const show = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(STORAGE_KEY, theme);
    show();
  });
  show();
}
