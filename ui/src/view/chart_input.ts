import type { Viewport } from '../model/viewport.ts';

export interface ChartCommands {
  /** Pixels right of the beginning of the time axis; `NaN` once the pointer is elsewhere. */
  hover(x: number, y: number): void;
  moved(): void;
  gutter(): number;
  width(): number;
}

/** Lets pointer and keys move the view; returns what ends it. */
export function listenToCharts(root: HTMLElement, list: HTMLElement, view: Viewport, commands: ChartCommands): () => void {
  const end = new AbortController();
  const options = { signal: end.signal };
  const place = (event: MouseEvent) => event.clientX - list.getBoundingClientRect().left - commands.gutter();
  let drag: { id: number; last: number } | null = null;
  list.addEventListener(
    'pointerdown',
    event => {
      if (event.button !== 0 || place(event) < 0) return;
      drag = { id: event.pointerId, last: event.clientX };
      list.setPointerCapture(event.pointerId);
      root.focus({ preventScroll: true });
    },
    options,
  );
  list.addEventListener(
    'pointermove',
    event => {
      if (drag?.id === event.pointerId && event.clientX !== drag.last) {
        view.pan(((drag.last - event.clientX) / commands.width()) * view.length);
        drag.last = event.clientX;
        commands.moved();
      }
      commands.hover(place(event), event.clientY);
    },
    options,
  );
  for (const name of ['pointerup', 'pointercancel'] as const) list.addEventListener(name, () => (drag = null), options);
  list.addEventListener('pointerleave', () => commands.hover(NaN, 0), options);
  list.addEventListener(
    'wheel',
    event => {
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      // The list itself may be scrolled, so that here the wheel zooms with Ctrl only.
      if ((!sideways && !event.ctrlKey && !event.metaKey) || place(event) < 0) return;
      event.preventDefault();
      const lines = event.deltaMode === 1 ? 16 : 1;
      if (sideways) view.pan((((event.deltaX || event.deltaY) * lines) / commands.width()) * view.length);
      else view.zoom(Math.exp(event.deltaY * lines * 0.0018), view.from + (place(event) / commands.width()) * view.length);
      commands.moved();
    },
    { ...options, passive: false },
  );
  root.addEventListener(
    'keydown',
    event => {
      if (event.target !== root || event.ctrlKey || event.metaKey || event.altKey || !press(event.key.toLowerCase(), event.shiftKey, view)) return;
      event.preventDefault();
      event.stopPropagation();
      commands.moved();
    },
    options,
  );
  return () => end.abort();
}

function press(key: string, shift: boolean, view: Viewport): boolean {
  const far = shift ? 0.5 : 0.12;
  if (['w', '+', '='].includes(key)) view.zoom(1 / 1.25);
  else if (['s', '-', '_'].includes(key)) view.zoom(1.25);
  else if (['a', 'arrowleft'].includes(key)) view.pan(-view.length * far);
  else if (['d', 'arrowright'].includes(key)) view.pan(view.length * far);
  else if (key === 'f') view.fit();
  else if (key === ' ') view.follow(!view.following);
  else return false;
  return true;
}
