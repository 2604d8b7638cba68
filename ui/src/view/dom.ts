type Child = Node | string | null | undefined | false;

/** An element with attributes and children; text is never read as HTML. */
export function h(tag: string, attributes: Record<string, string> = {}, ...children: Child[]): HTMLElement {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  for (const child of children) if (child) element.append(child);
  return element;
}

export function button(label: string, title: string, act: () => void): HTMLButtonElement {
  const element = h('button', { type: 'button', title, 'aria-label': title }, label) as HTMLButtonElement;
  element.addEventListener('click', act);
  return element;
}

/** An entry of a menu: something to do, or a link to another page. */
export type Item = { label: string; act: () => void } | { label: string; href: string };

/** A button that opens a list of actions and links; `null` without any. Arrow keys move in it, Escape closes it. */
export function menu(label: string, title: string, items: readonly Item[]): HTMLElement | null {
  if (!items.length) return null;
  const list = h('div', { class: 'hvd-menu', role: 'menu', hidden: '', 'aria-label': title });
  const open = button(label, title, () => show(list.hidden));
  open.setAttribute('aria-haspopup', 'menu');
  const show = (on: boolean) => {
    list.hidden = !on;
    open.setAttribute('aria-expanded', String(on));
    if (on) (list.firstElementChild as HTMLElement).focus();
  };
  show(false);
  for (const entry of items) {
    const text = entry.label;
    // A link, not a script that opens the page: editors such as VS Code only follow links.
    const item = 'href' in entry ? h('a', { href: entry.href, target: '_blank', rel: 'noopener', title: text }, text) : button(text, text, entry.act);
    item.setAttribute('role', 'menuitem');
    list.append(item);
  }
  const close = () => {
    show(false);
    open.focus();
  };
  // Captured, so that it comes before the action, which may move the focus.
  list.addEventListener('click', close, { capture: true });
  list.addEventListener('keydown', event => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === 'Escape') close();
    else if (event.key === ' ' && event.target instanceof HTMLAnchorElement) event.target.click();
    else if (step) {
      const all = [...list.children] as HTMLElement[];
      const at = all.findIndex(item => item.matches(':focus'));
      all[(at + step + all.length) % all.length].focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const box = h('span', { class: 'hvd-drop' }, open, list);
  box.addEventListener('focusout', event => {
    if (!(event.relatedTarget instanceof Node && box.contains(event.relatedTarget))) show(false);
  });
  return box;
}
