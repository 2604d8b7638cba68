import { Store } from '../model/store.ts';
import { Viewport } from '../model/viewport.ts';
import { MetricsView } from '../view/metrics.ts';
import { hideStill } from './still.ts';
import { Stream, type Model } from './stream.ts';

interface Shared {
  store: Store;
  view: Viewport;
  views: Set<MetricsView>;
}

const shared = new WeakMap<Model, Shared>();

/** What all views of one widget share; it outlives each of them. */
function share(model: Model): Shared {
  let found = shared.get(model);
  if (!found) {
    const one: Shared = { store: new Store(), view: new Viewport(), views: new Set() };
    one.view.span = 60e9;
    shared.set(model, (found = one));
    const stream = new Stream(one.store, model);
    model.on('msg:custom', ((message: never, buffers: DataView[]) => {
      if (stream.receive(message, buffers)) for (const view of one.views) view.data();
    }) as never);
    stream.hello();
  }
  return found;
}

function initialize({ model }: { model: Model }): void {
  share(model);
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const { store, view, views } = share(model);
  const metrics = new MetricsView(el, store, view);
  (metrics.root as HTMLElement & { hvdlab?: unknown }).hvdlab = metrics.api;
  views.add(metrics);
  const showStill = hideStill(el, String(model.get('still')));
  return () => {
    showStill();
    views.delete(metrics);
    metrics.dispose();
  };
}

export default { initialize, render };
/** For pages that have points from elsewhere. */
export { MetricsView, Store, Viewport };
