/** As much of a page as the tables need, for tests in node. */

/** An element with its children, which are elements and texts. */
export class FakeElement {
  readonly attributes = new Map<string, string>();
  readonly dataset: Record<string, string> = {};
  readonly style: Record<string, string> & { setProperty?(): void } = { setProperty() {} } as never;
  readonly acts = new Map<string, (event: unknown) => void>();
  readonly tag: string;
  children: (FakeElement | string)[] = [];
  parentElement: FakeElement | null = null;
  hidden = false;
  disabled = false;
  title = '';
  value = '';
  readonly classList = { add() {}, toggle() {}, contains: () => false };

  constructor(tag: string) {
    this.tag = tag;
  }

  setAttribute(name: string, value: string): void {
    this.attributes.set(name, value);
  }

  get className(): string {
    return this.attributes.get('class') ?? '';
  }

  set className(name: string) {
    this.attributes.set('class', name);
  }

  append(...nodes: (FakeElement | string)[]): void {
    this.children.push(...nodes);
    for (const node of nodes) if (node instanceof FakeElement) node.parentElement = this;
  }

  replaceChildren(...nodes: (FakeElement | string)[]): void {
    this.children = [];
    this.append(...nodes);
  }

  replaceWith(node: FakeElement): void {
    const parent = this.parentElement!;
    parent.children[parent.children.indexOf(this)] = node;
    [node.parentElement, this.parentElement] = [parent, null];
  }

  remove(): void {
    const { parentElement: parent } = this;
    if (parent) parent.children = parent.children.filter(one => one !== this);
    this.parentElement = null;
  }

  get firstElementChild(): FakeElement | null {
    return (this.children.find(one => one instanceof FakeElement) as FakeElement | undefined) ?? null;
  }

  get textContent(): string {
    return this.children.map(one => (typeof one === 'string' ? one : one.textContent)).join('');
  }

  set textContent(text: string) {
    this.replaceChildren(...(text ? [text] : []));
  }

  isEqualNode(other: FakeElement): boolean {
    return this.outline === other.outline;
  }

  /** The element in words: equal for elements that look the same. */
  get outline(): string {
    return JSON.stringify([this.tag, this.title, [...this.attributes], this.children.map(one => (typeof one === 'string' ? one : one.outline))]);
  }

  addEventListener(name: string, act: (event: unknown) => void): void {
    this.acts.set(name, act);
  }

  click(): void {
    this.acts.get('click')?.({});
  }

  /** All elements of a kind in this one, in their order. */
  all(tag: string): FakeElement[] {
    const elements = this.children.filter(one => one instanceof FakeElement) as FakeElement[];
    return elements.flatMap(one => [...(one.tag === tag ? [one] : []), ...one.all(tag)]);
  }

  focus(): void {}
  contains(): boolean {
    return false;
  }
  querySelectorAll(): FakeElement[] {
    return [];
  }
}

class Observer {
  observe(): void {}
  disconnect(): void {}
}

/** Put a page into this process; returns an element of it, in which a widget can be. */
export function fakePage(): FakeElement & HTMLElement {
  const document = { createElement: (tag: string) => new FakeElement(tag), body: new FakeElement('body'), documentElement: new FakeElement('html'), hidden: false, activeElement: null };
  const window = { setInterval: () => 0, setTimeout: (act: () => void, ms: number) => setTimeout(act, ms) };
  const observers = { MutationObserver: Observer, ResizeObserver: Observer };
  const frames = { requestAnimationFrame: () => 0, cancelAnimationFrame() {} };
  const getComputedStyle = () => ({ backgroundColor: 'rgb(255, 255, 255)' });
  Object.assign(globalThis, { document, window, getComputedStyle, HTMLElement: FakeElement, ...observers, ...frames });
  return new FakeElement('div') as never;
}

/** Signal of JupyterLab. */
export class Signal {
  readonly acts = new Set<() => void>();
  connect(act: () => void): void {
    this.acts.add(act);
  }
  disconnect(act: () => void): void {
    this.acts.delete(act);
  }
  emit(): void {
    for (const act of this.acts) act();
  }
}

/** Model of a widget in a page of JupyterLab, with the messages that the page has sent. */
export class FakeModel {
  readonly sent: { type: string; request?: string }[] = [];
  readonly kernel = { status: 'idle', connectionStatus: 'connected' };
  private readonly acts = new Map<string, Set<(...given: unknown[]) => void>>();
  private readonly signals = { statusChanged: new Signal(), connectionStatusChanged: new Signal(), kernelChanged: new Signal() };
  readonly widget_manager = { context: { sessionContext: { session: { kernel: this.kernel }, ...this.signals } } };
  private readonly traits: Record<string, unknown>;

  constructor(traits: Record<string, unknown>) {
    this.traits = traits;
  }

  get(name: string): unknown {
    return this.traits[name];
  }

  on(event: string, act: (...given: unknown[]) => void): void {
    this.acts.set(event, (this.acts.get(event) ?? new Set()).add(act));
  }

  off(event: string, act: (...given: unknown[]) => void): void {
    this.acts.get(event)?.delete(act);
  }

  send(content: never): void {
    this.sent.push(content);
  }

  receive(content: object): void {
    for (const act of this.acts.get('msg:custom') ?? []) act(content, []);
  }

  connect(status: 'connected' | 'connecting'): void {
    this.kernel.connectionStatus = status;
    this.signals.connectionStatusChanged.emit();
  }
}
