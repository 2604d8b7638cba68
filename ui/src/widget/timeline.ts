import { bytes } from '../draw/format.ts';
import { Liveness } from '../model/liveness.ts';
import { runs, Store } from '../model/store.ts';
import { Stream, type Model } from '../model/stream.ts';
import { Viewport } from '../model/viewport.ts';
import { t } from '../texts.ts';
import { Charts } from '../view/charts.ts';
import type { Actions } from '../view/options.ts';
import { Timeline } from '../view/timeline.ts';
import { watchKernel } from './kernel.ts';
import { hideStill } from './still.ts';

interface Shared {
  store: Store;
  view: Viewport;
  views: Set<Timeline>;
  liveness: Liveness;
  /** Called at the kernel's first message; `null` from then on. */
  waiting: Set<() => void> | null;
}

const shared = new WeakMap<Model, Shared>();

/** State that all views of one widget share; it outlives each of them. */
function share(model: Model): Shared {
  let found = shared.get(model);
  if (!found) {
    const one: Shared = { store: new Store(Number(model.get('limit'))), view: new Viewport(), views: new Set(), liveness: new Liveness(() => one.views.forEach(view => view.stand(one.liveness)), () => stream.hello()), waiting: new Set() };
    shared.set(model, (found = one));
    const stream = new Stream(one.store, model);
    model.on('msg:custom', ((message: { type: string; name: string; text: string }, buffers: DataView[]) => {
      one.waiting?.forEach(begin => begin());
      one.waiting = null;
      const tell = (text: string) => one.views.forEach(view => view.tell(text));
      if (message.type === 'file') {
        download(message.name, buffers[0]);
        tell(t('%1 (%2)', message.name, bytes(buffers[0].byteLength)));
      } else if (message.type === 'problem') tell(message.text);
      else if (stream.receive(message as never, buffers)) one.views.forEach(view => view.data());
      one.liveness.heard(runs(one.store));
    }) as never);
    stream.hello();
  }
  return found;
}

function initialize({ model }: { model: Model }): void {
  share(model);
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const all = share(model);
  const { store, view, views } = all;
  const actions: Actions = {
    save: () => {
      timeline.tell(t('saving…'));
      model.send({ type: 'save' });
    },
    open: canJump() ? site => void (jump(site) || timeline.tell(t('%1 is not in this page', site))) : undefined,
  };
  const timeline: Timeline = new Timeline(el, store, { view, height: Number(model.get('height')), actions, charts: (...place) => new Charts(...place) });
  (timeline.root as HTMLElement & { hvdlab?: unknown }).hvdlab = timeline.api;
  views.add(timeline);
  timeline.stand(all.liveness);
  const forget = watchKernel(model.widget_manager, String(model.get('still')), link => all.liveness.connected(link));
  // A notebook that was only opened has a picture and no kernel: the picture stays.
  let showStill = () => {};
  const begin = () => {
    timeline.root.hidden = false;
    showStill = hideStill(el, String(model.get('still')));
  };
  timeline.root.hidden = true;
  if (all.waiting) all.waiting.add(begin);
  else begin();
  return () => {
    forget();
    all.waiting?.delete(begin);
    showStill();
    views.delete(timeline);
    timeline.dispose();
  };
}

export default { initialize, render };
/** For pages that have rows from elsewhere. */
export { Charts, Store, Timeline, Viewport };

/** Lets the reader keep a file. */
export function download(name: string, content: DataView): void {
  const url = URL.createObjectURL(new Blob([content as unknown as BlobPart], { type: 'application/octet-stream' }));
  const link = document.createElement('a');
  link.href = url;
  link.download = name;
  link.click();
  // Not at once: the browser begins to read it after the click.
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** A site in a cell: its execution count and line. */
export function cellOf(site: string): { cell: string; line: number } | null {
  const found = site.match(/^cell (\[\d+\]) line (\d+)$/);
  return found && { cell: found[1], line: Number(found[2]) };
}

/** Whether the page around a widget is a notebook whose cells it can show. */
export function canJump(): boolean {
  return document.querySelector('.jp-Notebook') !== null;
}

/** Brings a line of a cell of this page into sight and marks it for a moment; false if it is not in the page. */
export function jump(site: string): boolean {
  const at = cellOf(site);
  if (!at) return false;
  const prompts = [...document.querySelectorAll('.jp-Notebook .jp-InputPrompt')];
  const prompt = prompts.find(one => one.textContent?.trim().startsWith(at.cell));
  const cell = prompt?.closest('.jp-Cell');
  const lines = cell?.querySelectorAll<HTMLElement>('.cm-line');
  const line = lines?.[at.line - 1];
  const still = matchMedia('(prefers-reduced-motion: reduce)').matches;
  (line ?? cell)?.scrollIntoView({ block: 'center', behavior: still ? 'auto' : 'smooth' });
  line?.animate([{ background: 'rgba(213, 94, 0, 0.45)' }, { background: 'transparent' }], { duration: 2500, easing: 'ease-in' });
  return cell !== undefined && cell !== null;
}
