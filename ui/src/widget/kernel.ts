import type { Link } from '../model/liveness.ts';

interface Signal {
  connect(act: (sender: unknown, value: unknown) => void): unknown;
  disconnect(act: (sender: unknown, value: unknown) => void): unknown;
}

interface Kernel {
  status: string;
  connectionStatus: string;
}

/** JupyterLab's session of a notebook, as far as it is used here. */
interface Session {
  session?: { kernel?: Kernel | null } | null;
  statusChanged: Signal;
  connectionStatusChanged: Signal;
  kernelChanged: Signal;
}

const ENDS = ['restarting', 'autorestarting', 'terminating', 'dead'];

/** Ends of kernels that a page has seen: how many of each session, and how many there were when a widget was shown first. */
interface Ends {
  ofSession: WeakMap<Session, { count: number }>;
  atFirst: Map<string, number>;
}

const ENDS_KEY = Symbol.for('hvdlab.ends');

/** Each widget's script is a module of its own, so the page keeps their shared state. */
function pageEnds(): Ends {
  const page = globalThis as { [ENDS_KEY]?: Ends };
  return (page[ENDS_KEY] ??= { ofSession: new WeakMap(), atFirst: new Map() });
}

/** Count the ends of a session's kernels from now on, for as long as the page has the session. */
function countEnds(session: Session): { count: number } {
  const { ofSession } = pageEnds();
  let ends = ofSession.get(session);
  if (!ends) {
    const counted = (ends = { count: 0 });
    ofSession.set(session, counted);
    let last = session.session?.kernel ?? null;
    const look = () => {
      const kernel = session.session?.kernel ?? null;
      if ((last && kernel !== last) || (kernel && ENDS.includes(kernel.status))) counted.count++;
      last = kernel;
    };
    session.statusChanged.connect(look);
    session.kernelChanged.connect(look);
  }
  return ends;
}

/**
 * Says how the kernel of a widget is, now and whenever that changes; returns what ends that.
 *
 * A widget belongs to one start of one kernel. JupyterLab may show it once more after a restart, in a view that has not seen
 * the restart: that there was one is known from the count of the session's ends when the widget was shown first.
 *
 * `manager` is the manager of widgets that anywidget hands on. Only JupyterLab and Notebook 7 have a session in it: elsewhere
 * a view learns by silence alone. `widget` is a text that no other widget has.
 */
export function watchKernel(manager: unknown, widget: string, link: (link: Link) => void): () => void {
  const session = (manager as { context?: { sessionContext?: Session } } | undefined)?.context?.sessionContext;
  if (!session?.statusChanged) return () => undefined;
  const ends = countEnds(session);
  const { atFirst } = pageEnds();
  const born = atFirst.get(widget) ?? ends.count;
  atFirst.set(widget, born);
  const look = () => {
    const kernel = session.session?.kernel ?? null;
    if (!kernel || ends.count !== born || ENDS.includes(kernel.status)) link('ended');
    else link(kernel.connectionStatus === 'connected' ? 'here' : 'away');
  };
  const signals = [session.statusChanged, session.connectionStatusChanged, session.kernelChanged];
  for (const signal of signals) signal.connect(look);
  look();
  return () => {
    for (const signal of signals) signal.disconnect(look);
  };
}
