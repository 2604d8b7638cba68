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

/**
 * Says how the kernel of a widget is, now and whenever that changes; returns what ends that.
 *
 * `manager` is the manager of widgets that anywidget hands on. Only JupyterLab and Notebook 7 have a session in it: elsewhere
 * a view learns by silence alone.
 */
export function watchKernel(manager: unknown, link: (link: Link) => void): () => void {
  const session = (manager as { context?: { sessionContext?: Session } } | undefined)?.context?.sessionContext;
  if (!session?.statusChanged) return () => undefined;
  const own = session.session?.kernel ?? null;
  const look = () => {
    const kernel = session.session?.kernel ?? null;
    // The model of a widget belongs to one kernel, also if the notebook has another one now.
    if (!kernel || kernel !== own || ENDS.includes(kernel.status)) link('ended');
    else link(kernel.connectionStatus === 'connected' ? 'here' : 'away');
  };
  const signals = [session.statusChanged, session.connectionStatusChanged, session.kernelChanged];
  for (const signal of signals) signal.connect(look);
  look();
  return () => {
    for (const signal of signals) signal.disconnect(look);
  };
}
