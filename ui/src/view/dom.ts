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
