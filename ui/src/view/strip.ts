import { percent } from '../draw/format.ts';
import type { Standing } from '../model/liveness.ts';
import { t } from '../texts.ts';
import { h, watchTheme } from './dom.ts';

/** Shares of the last seconds, 0 to 1; `known` is false for a rank that has recorded nothing. */
export interface RankShares {
  rank: number;
  known: boolean;
  compute: number;
  wait: number;
  work: number;
  slowest: boolean;
  /** Why it waits for its user: `at a prompt`; empty or missing if it does not. */
  paused?: string;
}

/** State of a running cell as the kernel sends it; the texts are ready to be shown. */
export interface StripState {
  ranks: RankShares[];
  /** `4 ranks · running [7]`. */
  heading: string;
  /** The same without saying that it runs. */
  title: string;
  /** Where all that the cell wrote is. */
  elsewhere: string;
  /** Seconds that the cell had been running when the strip was made. */
  made: number;
  /** CSS class of the picture that a saved notebook keeps. */
  still: string;
  /** Whether the cell has ended; nothing comes after that. */
  ended: boolean;
  /** `12.4 steps/s`. */
  rate: string;
  /** `others wait for rank 2 (31 %)`. */
  note: string;
  /** `rank 3 is at a prompt`; empty or missing if no rank waits for its user. */
  paused?: string;
  /** What the kernel could not bring up to date; empty or missing while all is well. */
  failed?: string;
  /** What the cell waits for; empty while all is well. */
  stalled: string;
  /** Seconds that the cell had been running when this was sent. */
  elapsed: number;
  /** Seconds since the last collective ended when this was sent; -1 if there was none. */
  silent: number;
}

const SILENT = 2;
/** Seconds by which the first state that a page gets may be older than the strip. */
const AT_ONCE = 1;
const WIDE = 16;

/** One line under a running cell: how fast it goes, and a bar per rank of computing against waiting. */
export class StripView {
  readonly root: HTMLElement;
  private readonly heading = h('span', { class: 'hvd-strip-heading' });
  private readonly rate = h('span', { class: 'hvd-strip-rate' });
  private readonly note = h('span', { class: 'hvd-strip-note' });
  private readonly time = h('span', { class: 'hvd-strip-time' });
  private readonly bars = h('span', { class: 'hvd-strip-bars' });
  private readonly opens = h('span', { class: 'hvd-strip-open', 'aria-hidden': 'true' }, t('timeline ▸'));
  private readonly endTheme: () => void;
  private readonly timer: number;
  private readonly rows: { root: HTMLElement; parts: HTMLElement[]; text: string }[] = [];
  private state: StripState | null = null;
  private standing: Standing = 'live';
  /** When the last state came; nothing if it was there before the page: it may be of long ago. */
  private at: number | null = null;
  private reopened = false;

  constructor(parent: HTMLElement, open: () => void) {
    this.root = h('div', { class: 'hvd-strip', role: 'button', tabindex: '0' }, this.heading, this.rate, this.bars, this.note, this.time, this.opens);
    const act = () => {
      if (this.root.dataset.asked || this.standing === 'ended') return;
      this.root.dataset.asked = 'true';
      this.opens.textContent = t('opens …');
      open();
    };
    this.root.addEventListener('click', act);
    this.root.addEventListener('keydown', event => {
      if (event.key !== 'Enter' && event.key !== ' ') return;
      // Else the notebook would take it.
      event.preventDefault();
      event.stopPropagation();
      act();
    });
    parent.append(this.root);
    this.endTheme = watchTheme(this.root, () => undefined);
    this.timer = window.setInterval(() => this.tick(), 1000);
  }

  /** The timeline is there. */
  opened(): void {
    this.opens.textContent = t('timeline opened');
  }

  /** Shows a state. One that is `news` has just come; another one was there when the page was opened. */
  update(state: StripState, news = true): void {
    if (!this.state) this.reopened = !news && state.elapsed > state.made + AT_ONCE;
    this.state = state;
    this.at = news ? performance.now() : null;
    this.show();
  }

  /** The kernel speaks, or does not any more. */
  stand(standing: Standing): void {
    this.standing = standing;
    if (this.state) this.show();
  }

  private show(): void {
    const state = this.state!;
    const ended = state.ended || this.standing === 'ended';
    const now = !ended && this.standing === 'live';
    this.heading.textContent = now ? state.heading : state.title;
    this.rate.textContent = now ? state.rate : '';
    // The text above the strip has more of what the cell waits for.
    const note = now ? state.paused || state.failed || (state.stalled ? t('stalled') : state.note) : '';
    const elsewhere = state.ended || this.reopened ? state.elsewhere : '';
    this.note.textContent = [note, elsewhere].filter(Boolean).join(' · ');
    this.note.title = now ? state.stalled : '';
    this.opens.hidden = this.standing === 'ended'; // no kernel could open it
    this.root.dataset.state = !now ? 'past' : state.paused ? 'paused' : state.stalled ? 'stalled' : 'running';
    this.draw(state.ranks);
    this.tick();
    const rate = now ? state.rate || t('no collectives yet') : this.time.textContent!;
    this.root.setAttribute('aria-label', t('%1, %2; %3. Opens the timeline.', this.heading.textContent, rate, now && state.stalled ? state.stalled : this.note.textContent));
  }

  private draw(ranks: RankShares[]): void {
    this.bars.classList.toggle('hvd-strip-many', ranks.length > WIDE);
    while (this.rows.length > ranks.length) this.rows.pop()!.root.remove();
    while (this.rows.length < ranks.length) {
      const parts = ['compute', 'work', 'wait'].map(kind => h('span', { class: `hvd-strip-${kind}` }));
      const root = h('span', { class: 'hvd-strip-rank', role: 'img' }, h('span', { class: 'hvd-strip-number' }), h('span', { class: 'hvd-strip-bar' }, ...parts));
      this.rows.push({ root, parts, text: '' });
      this.bars.append(root);
    }
    ranks.forEach((one, i) => {
      const row = this.rows[i];
      const shares = [one.compute, one.work, one.wait];
      const text = one.paused
        ? t('rank %1: %2', one.rank, t(one.paused))
        : one.known
          ? t('rank %1: computes %2, in collectives %3, waits %4', one.rank, percent(one.compute), percent(one.work), percent(one.wait))
          : t('rank %1: no collective yet', one.rank);
      row.parts.forEach((part, k) => part.style.setProperty('--share', String(one.known ? shares[k] : 0)));
      row.root.classList.toggle('hvd-strip-slowest', one.slowest);
      row.root.classList.toggle('hvd-strip-paused', !!one.paused);
      if (row.text === text) return;
      row.text = text;
      row.root.firstElementChild!.textContent = String(one.rank);
      row.root.title = text;
      row.root.setAttribute('aria-label', text);
    });
  }

  private tick(): void {
    const { state } = this;
    if (!state) return;
    const text = this.clock(state);
    if (this.time.textContent !== text) this.time.textContent = text;
  }

  /** How long the cell has run; it counts on only while the kernel speaks. */
  private clock(state: StripState): string {
    if (state.ended) return t('ended after %1', clock(state.elapsed));
    if (this.standing === 'ended') return t('ended · last news at %1', clock(state.elapsed));
    if (this.standing === 'away') return t('no connection since %1', clock(state.elapsed));
    if (this.standing === 'silent') return t('no news since %1', clock(state.elapsed));
    if (this.at === null) return clock(state.elapsed);
    const passed = (performance.now() - this.at) / 1000;
    const silent = state.silent < 0 ? -1 : state.silent + passed;
    const ago = silent >= SILENT ? `${t('last collective %1 s ago', Math.floor(silent))} · ` : '';
    return ago + clock(state.elapsed + passed);
  }

  dispose(): void {
    clearInterval(this.timer);
    this.endTheme();
    this.root.remove();
  }
}

/** `0:52`, `1:02:03`. */
export function clock(seconds: number): string {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (n: number) => String(n).padStart(2, '0');
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}
