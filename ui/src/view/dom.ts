import { paletteFor, type Palette, type Rgb } from '../draw/palette.ts';
import type { Liveness } from '../model/liveness.ts';
import type { Failure } from '../model/store.ts';
import { t } from '../texts.ts';

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

function parse(text: string): Rgb | null {
  const found = text.match(/rgba?\(([\d.]+)[ ,]+([\d.]+)[ ,]+([\d.]+)(?:[ ,/]+([\d.]+))?\)/);
  if (!found || found[4] === '0') return null;
  return [Number(found[1]), Number(found[2]), Number(found[3])];
}

/** The colour behind an element: its own, or that of the nearest ancestor that has one. */
export function backgroundOf(element: Element): Rgb {
  for (let at: Element | null = element; at; at = at.parentElement) {
    const colour = parse(getComputedStyle(at).backgroundColor);
    if (colour) return colour;
  }
  return [255, 255, 255];
}

/** Call back with the palette whenever the page's theme has changed; return a function that ends that. */
export function watchTheme(element: HTMLElement, changed: (palette: Palette) => void): () => void {
  let timer = 0;
  let frame = 0;
  let last = '';
  const look = () => {
    const palette = paletteFor(backgroundOf(element));
    const key = palette.background.join();
    if (key === last) return;
    last = key;
    element.dataset.theme = palette.dark ? 'dark' : 'light';
    changed(palette);
    // JupyterLab hides all there is for a frame when its theme changes: nothing has a size then, and nothing could be drawn.
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => (frame = requestAnimationFrame(() => changed(palette))));
  };
  const observer = new MutationObserver(() => {
    look();
    // The theme's style sheet may come after the attribute that names it.
    clearTimeout(timer);
    timer = window.setTimeout(look, 400);
  });
  observer.observe(document.body, { attributes: true });
  observer.observe(document.documentElement, { attributes: true });
  // Before the element is in the page it has no colours; this calls once it is.
  const placed = new ResizeObserver(() => {
    look();
    placed.disconnect();
  });
  placed.observe(element);
  look();
  return () => {
    placed.disconnect();
    observer.disconnect();
    clearTimeout(timer);
    cancelAnimationFrame(frame);
  };
}

/** Says that what is shown is not of now, and of when it is; empty while it is of now. */
export function standingText({ standing, at }: Liveness): string {
  const time = new Date(at).toLocaleTimeString();
  if (standing === 'ended') return t('ended · as of %1', time);
  if (standing === 'away') return t('no connection · as of %1', time);
  return standing === 'silent' ? t('no news since %1', time) : '';
}

/** What a view says in itself about failures; nothing while there are none. */
export class FailuresBox {
  readonly root = h('div', { class: 'hvd-failures', role: 'status', hidden: '' });
  private shown = '';

  update(failures: readonly Failure[]): void {
    const key = failures.map(one => one.text).join('\n');
    if (key === this.shown) return;
    this.shown = key;
    this.root.hidden = !failures.length;
    this.root.replaceChildren(...failures.map(one => h('details', {}, h('summary', {}, one.text), h('pre', {}, one.trace))));
  }
}
