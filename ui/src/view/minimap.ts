import { css, packed, mixed, type Palette } from '../draw/palette.ts';
import { Overview } from '../model/overview.ts';
import type { Store } from '../model/store.ts';
import type { Viewport } from '../model/viewport.ts';
import { t } from '../texts.ts';
import { h } from './dom.ts';

const HEIGHT = 30;
const BAR = 4;
const EDGE = 6;
const NARROWEST = 5;

/**
 * All there is on one line: how much of the time the ranks were in collectives and waited, where a rank was late, and
 * which part is in view. A pointer moves that part; keys have the timeline itself for it.
 */
export class Minimap {
  readonly root: HTMLElement;
  private readonly canvas = h('canvas', { 'aria-hidden': 'true' }) as HTMLCanvasElement;
  private readonly context: CanvasRenderingContext2D;
  private readonly picture = document.createElement('canvas');
  private readonly overview = new Overview();
  private readonly store: Store;
  private readonly view: Viewport;
  private readonly end = new AbortController();
  private palette: Palette | null = null;
  private gutter = 0;
  private width = 0;
  private ratio = 1;

  constructor(store: Store, view: Viewport, moved: (change: () => void) => void) {
    this.store = store;
    this.view = view;
    this.context = this.canvas.getContext('2d', { alpha: false })!;
    this.root = h('div', { class: 'hvd-minimap', title: t('Everything; drag to move, drag an edge to change how much is in view') }, this.canvas);
    this.listen(moved);
  }

  dispose(): void {
    this.end.abort();
  }

  /** Whether rows have come that it does not show yet. */
  get behind(): boolean {
    return this.store.count > 0 && this.overview.behind(this.store, this.steps);
  }

  private get steps(): number {
    return Math.max(1, Math.round((this.width - this.gutter - 1) * this.ratio));
  }

  /** Draws it, with time in the same columns as the lanes'; true if it wants the next frame, too. */
  draw(palette: Palette, width: number, gutter: number): boolean {
    this.resize(width, gutter);
    const { context: g, overview, store, ratio } = this;
    const fresh = overview.step(store, this.steps, performance.now());
    if (fresh || this.palette !== palette) this.paint(palette);
    this.palette = palette;
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = css(palette.background);
    g.fillRect(0, 0, width, HEIGHT);
    const [begin, end] = this.extent();
    if (end > begin && this.picture.width > 1) {
      g.imageSmoothingEnabled = false;
      g.drawImage(this.picture, this.x(overview.from), 3, Math.max(1, this.x(overview.to) - this.x(overview.from)), HEIGHT - 6);
    }
    if (store.count) this.frame(palette);
    return overview.busy;
  }

  private resize(width: number, gutter: number): void {
    this.ratio = Math.min(3, window.devicePixelRatio || 1);
    this.gutter = gutter;
    this.width = width;
    const [w, h] = [Math.round(width * this.ratio), Math.round(HEIGHT * this.ratio)];
    if (this.canvas.width === w && this.canvas.height === h) return;
    this.canvas.width = w;
    this.canvas.height = h;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${HEIGHT}px`;
  }

  /** The picture of all time, a column for each step. */
  private paint(palette: Palette): void {
    const { work, wait, late } = this.overview;
    const width = work.length;
    if (!width) return;
    const height = Math.round((HEIGHT - 6) * this.ratio);
    const bar = Math.round(BAR * this.ratio);
    const image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    const [ground, working, waiting] = [packed(palette.lane), packed(mixed(palette.kinds[0], palette.background, 0.75)), packed(palette.wait)];
    for (let x = 0; x < width; x++) {
      const room = height - bar;
      const low = Math.round(work[x] * room);
      const high = Math.min(room, low + Math.round(wait[x] * room));
      const top = late[x] ? packed(mixed(palette.late, palette.lane, 0.25 + 0.75 * late[x])) : ground;
      for (let y = 0; y < height; y++) {
        const from = height - 1 - y;
        pixels[y * width + x] = y < bar ? top : from < low ? working : from < high ? waiting : ground;
      }
    }
    this.picture.width = width;
    this.picture.height = height;
    this.picture.getContext('2d')!.putImageData(image, 0, 0);
  }

  private extent(): [number, number] {
    const { store } = this;
    return store.count ? [store.begin, Math.max(store.end, store.begin + 1)] : [0, 1];
  }

  private x(time: number): number {
    const [begin, end] = this.extent();
    return this.gutter + ((time - begin) / (end - begin)) * (this.width - this.gutter - 1);
  }

  private time(x: number): number {
    const [begin, end] = this.extent();
    return begin + ((x - this.gutter) / Math.max(1, this.width - this.gutter - 1)) * (end - begin);
  }

  /** Left and right end of what is in view, never too near to each other to be seen. */
  private window(): [number, number] {
    const last = this.width - 1;
    const left = Math.max(this.gutter, Math.min(last, this.x(this.view.from)));
    const right = Math.max(this.gutter, Math.min(last, this.x(this.view.to)));
    const less = Math.max(0, NARROWEST - (right - left)) / 2;
    const from = Math.max(this.gutter, Math.min(last - NARROWEST, left - less));
    return [from, Math.max(from + NARROWEST, right + less)];
  }

  private frame(palette: Palette): void {
    const { context: g, gutter, width } = this;
    const [left, right] = this.window();
    g.fillStyle = css(palette.background, 0.5);
    g.fillRect(gutter, 0, left - gutter, HEIGHT);
    g.fillRect(right, 0, width - right, HEIGHT);
    g.strokeStyle = css(palette.text, 0.55);
    g.lineWidth = 1;
    g.beginPath();
    g.roundRect(left + 0.5, 1.5, Math.max(2, right - left - 1), HEIGHT - 3, 3);
    g.stroke();
    if (right - left < 14) return;
    g.fillStyle = css(palette.text, 0.55);
    for (const x of [left - 1, right - 2]) {
      g.beginPath();
      g.roundRect(x, HEIGHT / 2 - 5, 3, 10, 1.5);
      g.fill();
    }
  }

  private listen(moved: (change: () => void) => void): void {
    const { canvas, view } = this;
    const { signal } = this.end;
    let drag: { part: 'all' | 'left' | 'right'; id: number; offset: number } | null = null;
    const partAt = (x: number): 'all' | 'left' | 'right' | null => {
      const [left, right] = this.window();
      if (right - left > 3 * EDGE && Math.abs(x - left) <= EDGE) return 'left';
      if (right - left > 3 * EDGE && Math.abs(x - right) <= EDGE) return 'right';
      return x >= left - EDGE && x <= right + EDGE ? 'all' : null;
    };
    const move = (x: number) => {
      if (!drag) return;
      const { part, offset } = drag;
      const time = this.time(x);
      if (part === 'left') moved(() => view.show(Math.min(time, view.to - 1000), view.to));
      else if (part === 'right') moved(() => view.show(view.from, Math.max(time, view.from + 1000)));
      else moved(() => view.pan(time - offset - view.from));
    };
    canvas.addEventListener(
      'pointerdown',
      event => {
        if (event.button || event.offsetX < this.gutter) return;
        const time = this.time(event.offsetX);
        const part = partAt(event.offsetX);
        drag = { part: part ?? 'all', id: event.pointerId, offset: part ? time - view.from : view.length / 2 };
        canvas.setPointerCapture(event.pointerId);
        if (!part) move(event.offsetX);
      },
      { signal },
    );
    canvas.addEventListener(
      'pointermove',
      event => {
        if (drag) return move(event.offsetX);
        const part = partAt(event.offsetX);
        canvas.style.cursor = event.offsetX < this.gutter ? 'default' : part === 'all' ? 'grab' : part ? 'ew-resize' : 'pointer';
      },
      { signal },
    );
    for (const name of ['pointerup', 'pointercancel'] as const) canvas.addEventListener(name, event => void (drag?.id === event.pointerId && (drag = null)), { signal });
    canvas.addEventListener('dblclick', () => moved(() => view.fit()), { signal });
  }
}
