// Tabs as the ARIA Authoring Practices have them: one stop for Tab, arrows between them, Home and End.

export function tabbed(list, opened) {
  const tabs = [...list.querySelectorAll("[role=tab]")];
  const panel = (tab) => document.getElementById(tab.getAttribute("aria-controls"));

  function open(tab) {
    for (const each of tabs) {
      const mine = each === tab;
      each.setAttribute("aria-selected", String(mine));
      each.tabIndex = mine ? 0 : -1;
      panel(each).hidden = !mine;
    }
    opened(tab.id.replace("tab-", ""));
  }

  list.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) open(tab);
  });
  list.addEventListener("keydown", (event) => {
    const here = tabs.indexOf(document.activeElement);
    const there = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (here < 0 || there === undefined) return;
    event.preventDefault();
    const tab = tabs[(there + tabs.length) % tabs.length];
    tab.focus();
    open(tab);
  });
  return { open: (name) => open(tabs.find((tab) => tab.id === `tab-${name}`) ?? tabs[0]) };
}
