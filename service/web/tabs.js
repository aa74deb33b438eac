// Tabs after the ARIA Authoring Practices: one of them is in the tab order; arrow keys, Home and End move between them.

export function connectTabs(list, onOpen) {
  const tabs = [...list.querySelectorAll("[role=tab]")];
  const panel = (tab) => document.getElementById(tab.getAttribute("aria-controls"));

  function open(tab) {
    for (const each of tabs) {
      const isOpen = each === tab;
      each.setAttribute("aria-selected", String(isOpen));
      each.tabIndex = isOpen ? 0 : -1;
      panel(each).hidden = !isOpen;
    }
    onOpen(tab.id.replace("tab-", ""));
  }

  list.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) open(tab);
  });
  list.addEventListener("keydown", (event) => {
    const index = tabs.indexOf(document.activeElement);
    const next = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (index < 0 || next === undefined) return;
    event.preventDefault();
    const tab = tabs[(next + tabs.length) % tabs.length];
    tab.focus();
    open(tab);
  });
  return { open: (name) => open(tabs.find((tab) => tab.id === `tab-${name}`) ?? tabs[0]) };
}
