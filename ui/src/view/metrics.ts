import { count, ranks as ranksText } from '../draw/format.ts';
import { newestEvent } from '../model/charts.ts';
import type { Liveness } from '../model/liveness.ts';
import { STOPPED, type Store } from '../model/store.ts';
import type { Viewport } from '../model/viewport.ts';
import { t } from '../texts.ts';
import { Charts } from './charts.ts';
import { button, h, FailuresBox, standingText, watchTheme } from './dom.ts';

const SMOOTH = 0.2;

/** Charts alone, with a toolbar and a time axis of their own. */
export class MetricsView {
  readonly root: HTMLElement;
  readonly charts: Charts;
  private past = '';
  private readonly store: Store;
  private readonly view: Viewport;
  private readonly state = h('span', { class: 'hvd-state' });
  private readonly status = h('span', { class: 'hvd-status', role: 'status' });
  private readonly failures = new FailuresBox();
  private readonly nothing = h('div', { class: 'hvd-legend' });
  private readonly follow: HTMLButtonElement;
  private readonly ends: (() => void)[] = [];
  private readonly still = matchMedia('(prefers-reduced-motion: reduce)');
  private frame = 0;
  private slow = 0;
  private visible = true;
  private shownEnd = -Infinity;

  constructor(parent: HTMLElement, store: Store, view: Viewport) {
    this.store = store;
    this.view = view;
    this.follow = button('', '', () => this.act(() => view.follow(!view.following)));
    this.follow.className = 'hvd-follow';
    const buttons = h(
      'span',
      { class: 'hvd-buttons' },
      this.follow,
      button('−', t('Zoom out (S)'), () => this.act(() => view.zoom(1.6))),
      button('+', t('Zoom in (W)'), () => this.act(() => view.zoom(1 / 1.6))),
      button('⤢', t('Show everything (F)'), () => this.act(() => view.fit())),
    );
    const bar = h('div', { class: 'hvd-bar' }, h('strong', {}, t('Metrics')), this.state, this.status, h('span', { class: 'hvd-space' }), buttons);
    const place = h('div', {});
    this.root = h('div', { class: 'hvd-view hvd-metrics' }, bar, this.failures.root, this.nothing, place);
    parent.append(this.root);
    this.charts = new Charts(place, store, view, { axis: true, height: 92, moved: () => this.act(() => undefined) });
    // JupyterLab's keys for cells must not act on the notebook while the charts have the focus; Ctrl-S and the like must.
    const guard = (event: KeyboardEvent) => this.root.toggleAttribute('data-lm-suppress-shortcuts', !event.ctrlKey && !event.metaKey);
    for (const name of ['keydown', 'keyup'] as const) this.root.addEventListener(name, guard, true);
    this.root.toggleAttribute('data-lm-suppress-shortcuts', true);
    const resized = new ResizeObserver(() => this.schedule());
    resized.observe(this.root);
    const seen = new IntersectionObserver(entries => {
      this.visible = entries[entries.length - 1].isIntersecting;
      if (this.visible) this.schedule();
    });
    seen.observe(this.root);
    this.ends.push(() => resized.disconnect(), () => seen.disconnect(), watchTheme(this.root, () => this.schedule()));
    this.data();
  }

  get api() {
    return { ...this.charts.api, store: this.store, view: this.view, metrics: this };
  }

  /** The kernel speaks, or does not any more. */
  stand(liveness: Liveness): void {
    this.past = standingText(liveness);
    this.schedule();
  }

  /** The store has changed. */
  data(): void {
    this.failures.update(this.store.failures);
    const { begin } = this.store.series;
    const end = newestEvent(this.store);
    const first = !Number.isFinite(this.shownEnd) && Number.isFinite(end);
    if (Number.isFinite(end)) this.view.data(begin, this.view.following && !first ? Math.max(this.shownEnd, this.view.to) : end);
    if (first) this.shownEnd = end;
    this.schedule();
  }

  dispose(): void {
    for (const end of this.ends) end();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.slow);
    this.frame = -1;
    this.charts.dispose();
    this.root.remove();
  }

  private act(change: () => void): void {
    change();
    if (this.view.following) this.shownEnd = Math.min(this.view.to, newestEvent(this.store));
    this.schedule();
  }

  schedule(): void {
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.paint());
  }

  private paint(): void {
    this.frame = 0;
    if (!this.visible || !this.root.isConnected) return;
    const { view, store, charts } = this;
    const { begin } = store.series;
    const end = newestEvent(store);
    if (view.following && Number.isFinite(end)) {
      const gap = end - this.shownEnd;
      const near = !(gap > view.length / 4000) || gap > view.length || this.still.matches;
      this.shownEnd = near ? end : this.shownEnd + gap * SMOOTH;
      view.data(begin, this.shownEnd);
      if (!near) this.schedule();
    }
    charts.root.hidden = charts.empty;
    charts.gutter = this.root.clientWidth < 560 ? 84 : 132;
    charts.draw();
    this.slow ||= window.setTimeout(() => this.texts(), 200);
  }

  private texts(): void {
    this.slow = 0;
    const { view, store } = this;
    const { series } = store;
    this.follow.textContent = view.following ? '❚❚' : '▶';
    this.follow.title = view.following ? t('Stand still (Space)') : t('Follow what happens (Space)');
    this.follow.setAttribute('aria-label', this.follow.title);
    const ended = store.heading === STOPPED;
    this.state.textContent = this.past || (ended ? t('ended') : view.following ? t('live') : t('paused'));
    this.state.dataset.live = String(view.following && !this.past && !ended);
    const gone = series.forgotten + series.lostBefore;
    const parts = [ranksText([...new Set(series.all.map(one => one.rank))].sort((a, b) => a - b)), t('%1 series', count(series.named.size)), t('%1 points', count(series.count))];
    if (gone) parts.push(t('%1 oldest dropped', count(gone)));
    this.status.textContent = series.all.length ? parts.join(' · ') : '';
    this.nothing.hidden = series.all.length > 0;
    this.nothing.textContent = t('Nothing was measured yet. `hvd.metric("loss", loss)` in a cell of the ranks draws a line here.');
  }
}
