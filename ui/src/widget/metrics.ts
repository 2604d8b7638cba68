import { Liveness } from '../model/liveness.ts';
import { runs, Store } from '../model/store.ts';
import { Stream, type Model } from '../model/stream.ts';
import { Viewport } from '../model/viewport.ts';
import { MetricsView } from '../view/metrics.ts';
import { watchKernel } from './kernel.ts';
import { hideStill } from './still.ts';

interface Shared {
  store: Store;
  view: Viewport;
  /** Handlers of the views for new data. */
  views: Set<() => void>;
  liveness: Liveness;
}

const shared = new WeakMap<Model, Shared>();

/** State that all views of one widget share; it outlives each of them. */
function share(model: Model): Shared {
  let found = shared.get(model);
  if (!found) {
    const one: Shared = { store: new Store(), view: new Viewport(), views: new Set(), liveness: new Liveness(() => one.views.forEach(view => view()), () => stream.hello()) };
    one.view.span = 60e9;
    shared.set(model, (found = one));
    const stream = new Stream(one.store, model);
    model.on('msg:custom', ((message: never, buffers: DataView[]) => {
      const changed = stream.receive(message, buffers);
      one.liveness.heard(runs(one.store));
      if (changed) for (const view of one.views) view();
    }) as never);
    stream.hello();
  }
  return found;
}

function initialize({ model }: { model: Model }): void {
  share(model);
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const { store, view, views, liveness } = share(model);
  const metrics = new MetricsView(el, store, view);
  (metrics.root as HTMLElement & { hvdlab?: unknown }).hvdlab = metrics.api;
  // A widget that was restored without its kernel has nothing to show, and the still picture has.
  let showStill: (() => void) | null = null;
  const update = () => {
    metrics.stand(liveness);
    metrics.data();
    if (store.series.all.length) showStill ??= hideStill(el, String(model.get('still')));
  };
  views.add(update);
  update();
  const forget = watchKernel(model.widget_manager, String(model.get('still')), link => liveness.connected(link));
  return () => {
    forget();
    showStill?.();
    views.delete(update);
    metrics.dispose();
  };
}

export default { initialize, render };
/** For pages that have points from elsewhere. */
export { MetricsView, Store, Viewport };
