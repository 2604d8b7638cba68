import { paletteFor, type Palette, type Rgb } from '../draw/palette.ts';

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

/** Calls back with the palette whenever the page's theme has changed; returns what ends that. */
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
