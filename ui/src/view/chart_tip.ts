import { number, quantity } from '../draw/format.ts';
import { css, rankColour, type Palette } from '../draw/palette.ts';
import type { Chart } from '../model/charts.ts';
import type { Series } from '../model/series.ts';
import { t } from '../texts.ts';
import { shareColours, shareName, type ChartView } from './chart.ts';
import { titleOf } from './chart_texts.ts';
import { h } from './dom.ts';

const MOST = 12;
const ENDS = 4;

interface Value {
  rank: number;
  value: number;
  step: number;
  time: number;
}

/** The measured value of each rank that is nearest to a time, at most `slack` away. */
export function valuesAt(series: readonly Series[], time: number, slack: number): Value[] {
  const found = [];
  for (const one of series) {
    const i = one.nearest(time);
    if (i >= 0 && Math.abs(one.time[i] - time) <= slack) found.push({ rank: one.rank, value: one.value[i], step: one.step[i], time: one.time[i] });
  }
  return found;
}

/** What was measured near a time, as a table. */
export function tipFor(view: ChartView, time: number, slack: number, palette: Palette, ranks: readonly number[], chosen: ReadonlySet<number>): HTMLElement[] {
  const { chart } = view;
  if (chart.kind === 'shares') return shares(view, time, slack, palette, chosen);
  const values = valuesAt(view.series(), time, slack);
  if (!values.length) return [];
  const steps = [...new Set(values.map(one => one.step).filter(step => !Number.isNaN(step)))];
  const head = `${(values[0].time / 1e9).toFixed(2)} s${steps.length === 1 ? ` · ${t('step %1', number(steps[0]))}` : ''}`;
  const rows = few(values, chosen).map(one => row(chart, one, palette, ranks));
  return [h('div', { class: 'hvd-tip-name' }, titleOf(chart.id), h('span', { class: 'hvd-faint' }, ` ${head}`)), h('div', { class: 'hvd-tip-values' }, ...rows)];
}

function row(chart: Chart, one: Value | string, palette: Palette, ranks: readonly number[]): HTMLElement {
  if (typeof one === 'string') return h('div', { class: 'hvd-faint' }, one);
  const colour = css(rankColour(ranks.indexOf(one.rank), palette));
  return h('div', {}, h('i', { class: 'hvd-dot', style: `background:${colour}` }), h('span', {}, t('rank %1', one.rank)), h('b', {}, quantity(one.value, chart.unit)));
}

/** All by rank if they are few; otherwise the chosen ones, and the greatest and the least. */
function few(values: Value[], chosen: ReadonlySet<number>): (Value | string)[] {
  if (values.length <= MOST) return values;
  const sorted = [...values].sort((a, b) => b.value - a.value);
  const picked = sorted.filter((one, i) => i < ENDS || i >= sorted.length - ENDS || chosen.has(one.rank));
  const after = picked.findIndex((one, i) => i >= ENDS - 1 && !chosen.has(one.rank));
  return [...picked.slice(0, after + 1), t('… %1 more', values.length - picked.length), ...picked.slice(after + 1)];
}

function shares(view: ChartView, time: number, slack: number, palette: Palette, chosen: ReadonlySet<number>): HTMLElement[] {
  const colours = shareColours(palette);
  let at = NaN;
  let ranks = 0;
  const rows = view.stacked.map((name, i) => {
    const values = valuesAt(view.series(name).filter(one => !chosen.size || chosen.has(one.rank)), time, slack);
    if (!values.length) return null;
    at = values[0].time;
    ranks = values.length;
    const mean = values.reduce((sum, one) => sum + one.value, 0) / values.length;
    return h('div', {}, h('i', { class: 'hvd-dot', style: `background:${css(colours[i])}` }), h('span', {}, shareName(name)), h('b', {}, quantity(mean, '1')));
  });
  if (Number.isNaN(at)) return [];
  const begin = (at - 5e8) / 1e9;
  const head = ` ${begin.toFixed(1)}–${(begin + 1).toFixed(1)} s · ${ranks === 1 ? t('rank %1', [...chosen][0] ?? 0) : t('mean of %1 ranks', ranks)}`;
  return [h('div', { class: 'hvd-tip-name' }, titleOf(view.chart.id), h('span', { class: 'hvd-faint' }, head)), h('div', { class: 'hvd-tip-values' }, ...rows.filter(one => one !== null))];
}
