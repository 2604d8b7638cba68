import type { Scene } from './scene.ts';

/** What pointer and keys ask for. Positions are pixels on the canvas. */
export interface Commands {
  zoom(factor: number, x?: number): void;
  pan(pixels: number): void;
  hover(x: number, y: number): void;
  leave(): void;
  click(x: number, y: number): void;
  range(from: number, to: number): void;
  key(key: string, shift: boolean): boolean;
}

const CLICK = 4; // pixels that a click may move

/** Listens on the canvas; returns what ends it. */
export function listen(scene: Scene, commands: Commands): () => void {
  const { canvas } = scene;
  const end = new AbortController();
  const on = <K extends keyof HTMLElementEventMap>(name: K, act: (event: HTMLElementEventMap[K]) => void, passive = true) =>
    canvas.addEventListener(name, act, { signal: end.signal, passive });
  let drag: { id: number; x: number; y: number; last: number; choosing: boolean; moved: boolean } | null = null;

  on('pointerdown', event => {
    if (event.button !== 0) return;
    const choosing = event.shiftKey || event.offsetY < scene.top;
    drag = { id: event.pointerId, x: event.offsetX, y: event.offsetY, last: event.offsetX, choosing, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  on('pointermove', event => {
    const x = event.offsetX;
    if (!drag) {
      const over = scene.headingAt(event.offsetY) || scene.cellAt(x, event.offsetY);
      canvas.style.cursor = over ? 'pointer' : event.shiftKey || event.offsetY < scene.top ? 'col-resize' : 'default';
      commands.hover(x, event.offsetY);
      return;
    }
    if (Math.abs(x - drag.x) >= CLICK) drag.moved = true;
    if (!drag.moved) return;
    if (drag.choosing) commands.range(drag.x, x);
    else {
      canvas.style.cursor = 'grabbing';
      commands.pan(drag.last - x);
      drag.last = x;
    }
  });
  const release = (event: PointerEvent) => {
    if (!drag || drag.id !== event.pointerId) return;
    const done = drag;
    drag = null;
    canvas.style.cursor = 'default';
    if (done.moved && done.choosing) commands.range(done.x, event.offsetX);
    else if (!done.moved && event.type === 'pointerup') commands.click(done.x, done.y);
  };
  on('pointerup', release);
  on('pointercancel', release);
  on('pointerleave', () => commands.leave());
  on(
    'wheel',
    event => {
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      // A page that is scrolled must not get stuck here: the wheel zooms once the timeline was clicked, or with Ctrl.
      if (!sideways && !event.ctrlKey && !event.metaKey && document.activeElement !== canvas) {
        const root = canvas.getRootNode();
        if (!(root instanceof ShadowRoot) || root.activeElement !== canvas) return;
      }
      event.preventDefault();
      const lines = event.deltaMode === 1 ? 16 : 1;
      if (sideways) commands.pan((event.deltaX || event.deltaY) * lines);
      else commands.zoom(Math.exp(event.deltaY * lines * 0.0018), event.offsetX);
    },
    false,
  );
  on(
    'keydown',
    event => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (commands.key(event.key, event.shiftKey)) {
        event.preventDefault();
        event.stopPropagation();
      }
    },
    false,
  );
  return () => end.abort();
}
