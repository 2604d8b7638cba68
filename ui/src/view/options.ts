import type { Store } from '../model/store.ts';
import type { Viewport } from '../model/viewport.ts';

/** The page that opens saved traces; it uploads nothing. */
export const PERFETTO = 'https://ui.perfetto.dev';

/** Actions that the host of a timeline offers. The button of a missing action is left out. */
export interface Actions {
  /** Goes to a line of code, as `Store.sites` names it. */
  open?(site: string): void;
  /** Saves what was recorded as a Chrome trace. */
  save?(): void;
}

/** Charts on the same time axis as the lanes. */
export interface ChartsView {
  readonly root: HTMLElement;
  /** Pixels left of the time axis, as many as the lanes have. */
  gutter: number;
  /** True while there is nothing to show. */
  readonly empty: boolean;
  /** The view has moved or there is something new. */
  draw(): void;
  dispose(): void;
}

export interface TimelineOptions {
  /** Shared with another view, or one of its own. */
  view?: Viewport;
  /** The most pixels for the lanes. */
  height?: number;
  /** Takes all of the parent's height instead. */
  fill?: boolean;
  title?: string;
  actions?: Actions;
  /** Makes the charts under the lanes, when they are first shown. */
  charts?: (parent: HTMLElement, store: Store, view: Viewport) => ChartsView;
  /** Whether charts are shown at first, if there are any; by default where it fills a place that is high enough. */
  withCharts?: boolean;
}
