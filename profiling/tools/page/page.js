// Draws the steps and the lanes of the page from the data in it. Times are microseconds of the run.
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const byId = (id) => document.getElementById(id);
const clamp = (value, least, most) => Math.max(least, Math.min(most, value));
const LEFT = 160, ROW = 16, STEP_HEIGHT = 84, PLOT_TOP = 8, PLOT_BOTTOM = 18, CLOSE = 0.1;  // pixels; CLOSE: microseconds, to which times are rounded
let colors = {};
function readColors() {
  const now = getComputedStyle(document.documentElement);
  for (const name of ['text', 'muted', 'panel', 'line', 'grid', 'focus', 'mark', 'compute', 'exposed', 'unsplit', 'failed', ...data.kinds])
    colors[name] = now.getPropertyValue('--' + name).trim();
}

// --- numbers -------------------------------------------------------------------------------------------------------
function ms(microseconds, digits = 3) {
  return microseconds === null ? 'not recorded' : (microseconds / 1e3).toLocaleString('en', {minimumFractionDigits: digits, maximumFractionDigits: digits}) + ' ms';
}
// A distance between labels that keeps them apart: 1, 2 or 5 times a power of ten.
function stride(span, most) {
  const rough = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
}
function ticks(begin, end, most) {
  const step = stride(end - begin, most), places = [];
  for (let at = Math.ceil(begin / step) * step; at <= end; at += step) places.push(at);
  return {step, places};
}
const label = (value, step) => (value || 0).toLocaleString('en', {maximumFractionDigits: Math.max(0, Math.ceil(-Math.log10(step) - 1e-9))});
// The first of sorted values that is greater than `value`.
function upper(values, value) {
  let low = 0, high = values.length;
  while (low < high) { const middle = (low + high) >> 1; values[middle] <= value ? low = middle + 1 : high = middle; }
  return low;
}

// --- the view ------------------------------------------------------------------------------------------------------
// A part of a range that can be moved and resized; tells its listeners.
class View {
  constructor(least, most, begin, end, smallest) { Object.assign(this, {least, most, begin, end, smallest, changed: []}); }
  show(begin, end) {
    const span = clamp(end - begin, Math.min(this.smallest, this.most - this.least), this.most - this.least);
    this.begin = clamp(begin, this.least, this.most - span);
    this.end = this.begin + span;
    for (const tell of this.changed) tell();
  }
  zoom(factor, at = (this.begin + this.end) / 2) { this.show(at - (at - this.begin) * factor, at + (this.end - at) * factor); }
  move(share) { const by = (this.end - this.begin) * share; this.show(this.begin + by, this.end + by); }
  all() { this.show(this.least, this.most); }
}
const time = new View(data.begin, data.end, data.view[0], data.view[1], 1);
const bars = data.steps ? data.steps.ranks[0].total.length : 0;
const steps = new View(0, bars, 0, bars, Math.min(5, bars));

// A canvas with the screen's own pixels, for every size of the window and every scale of the screen.
class Drawing {
  constructor(canvas, height, view, paint) {
    Object.assign(this, {canvas, height, view, paint});
    this.context = canvas.getContext('2d');
    canvas.style.height = height + 'px';
    view.changed.push(() => this.later());
    new ResizeObserver(() => this.later()).observe(canvas);
  }
  later() {
    if (this.waits) return;
    this.waits = true;
    requestAnimationFrame(() => { this.waits = false; this.now(); });
  }
  now() {
    const width = this.canvas.clientWidth, scale = window.devicePixelRatio || 1;
    if (width === 0) return;  // the canvas is folded away
    this.width = width;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.context.clearRect(0, 0, width, this.height);
    this.context.font = '11px system-ui, sans-serif';
    this.context.textBaseline = 'middle';
    this.paint(this);
  }
  x(value) { return LEFT + (value - this.view.begin) / (this.view.end - this.view.begin) * (this.width - LEFT - 8); }
  at(x) { return this.view.begin + (x - LEFT) / (this.width - LEFT - 8) * (this.view.end - this.view.begin); }
  box(from, y, to, height, color) {  // on whole pixels, so that colours equal those of the legend
    const left = Math.round(from), right = Math.max(left + 1, Math.round(to));
    this.context.fillStyle = color;
    this.context.fillRect(left, Math.round(y), right - left, Math.max(1, Math.round(height)));
  }
  text(text, x, y, color, align = 'left') {
    this.context.fillStyle = color;
    this.context.textAlign = align;
    this.context.fillText(text, x, y);
  }
  fitted(text, width) {
    if (this.context.measureText(text).width <= width) return text;
    while (text.length > 1 && this.context.measureText(text + '…').width > width) text = text.slice(0, -1);
    return text + '…';
  }
}

// --- lanes ---------------------------------------------------------------------------------------------------------
const stepsText = (begin, end) => {
  const rank = data.ranks.find((one) => one.steps.length > 0);
  if (!rank) return '';
  const first = upper(rank.steps, begin + CLOSE), last = upper(rank.steps, end - CLOSE);
  if (last === 0) return ' (before step 0)';
  const from = Math.max(0, first - 1);
  return from === last - 1 ? ` (in step ${from} of ${rank.steps.length})` : ` (steps ${from} to ${last - 1} of ${rank.steps.length})`;
};
function sayTime() {
  byId('shown').textContent = `Shown: ${ms(time.begin)} to ${ms(time.end)}, ${ms(time.end - time.begin)} of the run's ${ms(data.run_end)}${stepsText(time.begin, time.end)}.`;
}
function paintAxis(drawing) {
  const {step, places} = ticks(time.begin / 1e3, time.end / 1e3, (drawing.width - LEFT) / 90);
  drawing.text('time in ms', 8, 12, colors.muted);
  for (const at of places) {
    const x = drawing.x(at * 1e3);
    drawing.box(x, 20, x + 1, 6, colors.muted);
    drawing.text(label(at, step), clamp(x, LEFT, drawing.width - 24), 12, colors.text, 'center');
  }
}
// An operation's name, in front of which is the part of the program that it belongs to, as in errors.
const nameOf = (lane, i) => (lane.called_by && data.names[lane.called_by[i]] ? data.names[lane.called_by[i]] + ': ' : '') + data.names[lane.label[i]];
function spanColor(lane, i) { return lane.bad[i] ? colors.failed : colors[data.kinds[lane.kind[i]]]; }
function paintLane(drawing, lane, y) {
  const context = drawing.context;
  drawing.text(drawing.fitted(lane.name, LEFT - 16), LEFT - 8, y + ROW / 2, colors.muted, 'right');
  // Ranges that begin before the view may reach into it: they begin at most `longest` before it.
  let reached = {};
  for (let i = upper(lane.begin, time.begin - lane.longest); i < lane.begin.length && lane.begin[i] <= time.end; ++i) {
    const end = lane.begin[i] + lane.length[i];
    if (end < time.begin) continue;
    const left = Math.max(LEFT, drawing.x(lane.begin[i])), right = Math.min(drawing.width - 8, drawing.x(end));
    const row = lane.depth[i];
    if (right < (reached[row] ?? -1) && !lane.bad[i]) continue;  // hidden under a drawn pixel
    reached[row] = Math.floor(left) + 1;
    const top = y + row * ROW + 2;
    drawing.box(left, top, right, ROW - 4, spanColor(lane, i));
    if (lane === picked.lane && i === picked.index) {
      context.strokeStyle = colors.mark;
      context.lineWidth = 2;
      context.strokeRect(Math.round(left), Math.round(top), Math.max(2, right - left), ROW - 4);
    }
    if (right - left > 40) {
      drawing.context.font = '10px system-ui, sans-serif';
      const name = (lane.count[i] > 1 ? lane.count[i] + ' × ' : '') + nameOf(lane, i);
      drawing.text(drawing.fitted(name, right - left - 6), left + 3, y + row * ROW + ROW / 2, colors.panel);
      drawing.context.font = '11px system-ui, sans-serif';
    }
  }
}
function paintRank(rank) {
  return (drawing) => {
    const {places} = ticks(time.begin / 1e3, time.end / 1e3, (drawing.width - LEFT) / 90);
    for (const at of places) drawing.box(drawing.x(at * 1e3), 0, drawing.x(at * 1e3) + 1, drawing.height, colors.grid);
    for (const at of rank.steps) {
      if (at >= time.begin && at <= time.end) drawing.box(drawing.x(at), 0, drawing.x(at) + 1, drawing.height, colors.mark);
    }
    for (const lane of rank.lanes) paintLane(drawing, lane, lane.top);
  };
}
function spanText(rank, lane, i) {
  let text = `${nameOf(lane, i)}${lane.sequence && lane.sequence[i] > 0 ? ' #' + lane.sequence[i] : ''}: ${ms(lane.length[i])} from ${ms(lane.begin[i])}`;
  if (lane.count[i] > 1) text = `${lane.count[i]} spans, the longest ${nameOf(lane, i)}: ${ms(lane.length[i])} from ${ms(lane.begin[i])} together`;
  const facts = [];
  if (lane.bytes && lane.bytes[i] > 0) facts.push(`${lane.bytes[i].toLocaleString('en')} bytes`);
  if (lane.peer && lane.peer[i] >= 0) facts.push(`peer rank ${lane.peer[i]}`);
  if (lane.group && data.names[lane.group[i]]) facts.push(`in ${data.names[lane.group[i]]}`);
  if (lane.state && data.names[lane.state[i]]) facts.push(data.names[lane.state[i]]);
  return text + (facts.length ? '\n' + facts.join(', ') : '') + `\nrank ${rank.rank}, ${lane.name}`;
}
const picked = {lane: null, index: -1, rank: null};
function pick(rank, lane, index) {
  Object.assign(picked, {rank, lane, index});
  byId('picked').textContent = lane ? spanText(rank, lane, index) : 'Nothing is chosen.';
  for (const tell of time.changed) tell();
}
// The innermost span at a point of a rank's canvas, or null.
function spanAt(drawing, rank, x, y) {
  const lane = rank.lanes.find((one) => y >= one.top && y < one.top + one.height);
  if (!lane || x < LEFT) return null;
  const row = Math.floor((y - lane.top) / ROW), from = drawing.at(x - 2), to = drawing.at(x + 2);
  let best = -1;
  for (let i = upper(lane.begin, from - lane.longest); i < lane.begin.length && lane.begin[i] <= to; ++i) {
    if (lane.depth[i] === row && lane.begin[i] + lane.length[i] >= from) best = i;
  }
  return best < 0 ? null : {lane, index: best};
}
// `rank` is the rank whose canvas has the focus. If no span is chosen yet, chooses the first one in view there.
function pickNext(by, rank) {
  if (picked.lane) {
    pick(picked.rank, picked.lane, clamp(picked.index + by, 0, picked.lane.begin.length - 1));
  } else {
    const first = (lane) => Math.min(upper(lane.begin, time.begin - CLOSE), lane.begin.length - 1);
    const inView = rank.lanes.find((lane) => lane.begin[first(lane)] >= time.begin - CLOSE && lane.begin[first(lane)] <= time.end);
    const lane = inView ?? rank.lanes[0];
    pick(rank, lane, first(lane));
  }
  showPicked();
}
function pickLane(by, rank) {
  if (!picked.lane) return pickNext(0, rank);
  const all = data.ranks.flatMap((one) => one.lanes.map((lane) => ({rank: one, lane})));
  const next = all[clamp(all.findIndex((one) => one.lane === picked.lane) + by, 0, all.length - 1)];
  const at = picked.lane.begin[picked.index];
  pick(next.rank, next.lane, clamp(upper(next.lane.begin, at) - 1, 0, next.lane.begin.length - 1));
  showPicked();
}
function showPicked() {
  const begin = picked.lane.begin[picked.index], end = begin + picked.lane.length[picked.index];
  if (begin < time.begin || end > time.end) {
    const span = Math.max(time.end - time.begin, (end - begin) * 1.2);
    time.show((begin + end) / 2 - span / 2, (begin + end) / 2 + span / 2);
  }
}
function goToStep(by) {
  const rank = data.ranks.find((one) => one.steps.length > 0);
  if (!rank) return;
  const step = clamp(upper(rank.steps, time.begin + CLOSE) - 1 + by, 0, rank.steps.length - 1);
  const begin = rank.steps[step], end = rank.steps[step + 1] ?? data.run_end;
  time.show(begin, end);
}

// --- steps ---------------------------------------------------------------------------------------------------------
// The means of a pixel's bars, if there are more bars than pixels.
function barsOf(times, from, to) {
  const sums = {total: 0, exposed: 0, waiting: 0};
  for (let i = from; i < to; ++i) {
    sums.total += times.total[i];
    sums.exposed = sums.exposed === null || times.exposed[i] === null ? null : sums.exposed + times.exposed[i];
    sums.waiting += times.waiting[i];
  }
  const count = to - from;
  return {total: sums.total / count, exposed: sums.exposed === null ? null : sums.exposed / count, waiting: sums.waiting / count};
}
function paintSteps(times) {
  return (drawing) => {
    const height = STEP_HEIGHT - PLOT_TOP - PLOT_BOTTOM, base = PLOT_TOP + height, most = data.steps.most;
    drawing.context.font = 'bold 11px system-ui, sans-serif';
    drawing.text('rank ' + times.rank, 8, PLOT_TOP + 8, colors.text);
    drawing.context.font = '11px system-ui, sans-serif';
    const scale = ticks(0, most / 1e3, 3);
    for (const at of scale.places) {
      const y = base - at * 1e3 / most * height;
      drawing.box(LEFT, y, drawing.width - 8, 1, colors.grid);
      drawing.text(label(at, scale.step) + ' ms', LEFT - 8, clamp(y, 8, STEP_HEIGHT - 8), colors.muted, 'right');
    }
    const wide = (drawing.width - LEFT - 8) / (steps.end - steps.begin), together = Math.max(1, Math.ceil(1 / wide));
    for (let i = Math.floor(steps.begin); i < Math.ceil(steps.end); i += together) {
      const one = barsOf(times, i, Math.min(i + together, bars)), left = Math.max(LEFT, drawing.x(i));
      const right = Math.max(left + 1, drawing.x(Math.min(i + together, bars)) - (wide > 4 ? 1 : 0));
      const whole = Math.min(one.total, most) / most * height, exposed = one.exposed === null ? 0 : whole * clamp(one.exposed / (one.total || 1), 0, 1);
      drawing.box(left, base - whole, right, whole, one.exposed === null ? colors.unsplit : colors.compute);
      if (exposed > 0) drawing.box(left, base - whole, right, exposed, colors.exposed);
      if (one.total > most) drawing.box(left, PLOT_TOP - 4, Math.max(right, left + 3), 3, colors.mark);  // higher than the axis
      if (i === chosenBar) drawing.box(left, base + 1, Math.max(right, left + 3), 3, colors.focus);
    }
    const {step, places} = ticks(steps.begin * data.steps.per_bar, steps.end * data.steps.per_bar, (drawing.width - LEFT) / 80);
    for (const at of places) {
      if (at !== Math.round(at)) continue;
      const x = drawing.x((at + data.steps.per_bar / 2) / data.steps.per_bar);
      if (x < drawing.width - 20) drawing.text('step ' + label(at, step), x, STEP_HEIGHT - 8, colors.muted, 'center');
    }
  };
}
let chosenBar = -1;
function stepText(times, i) {
  const first = i * data.steps.per_bar, last = Math.min(first + data.steps.per_bar, data.steps.count) - 1;
  const compute = times.exposed[i] === null ? null : times.total[i] - times.exposed[i];
  return `rank ${times.rank}, ${first === last ? 'step ' + first : `means of steps ${first} to ${last}`}: ${ms(times.total[i])}\ncompute ${ms(compute)}, exposed ${ms(times.exposed[i])}, waiting ${ms(times.waiting[i])}`;
}
function chooseBar(i, zoom) {
  chosenBar = clamp(i, 0, bars - 1);
  byId('picked').textContent = data.steps.ranks.map((times) => stepText(times, chosenBar)).join('\n');
  if (chosenBar < steps.begin || chosenBar >= steps.end) steps.show(chosenBar - (steps.end - steps.begin) / 2, chosenBar + (steps.end - steps.begin) / 2);
  for (const tell of steps.changed) tell();
  if (!zoom) return;
  const rank = data.ranks.find((one) => one.steps.length > 0), first = chosenBar * data.steps.per_bar;
  time.show(rank.steps[first], rank.steps[first + data.steps.per_bar] ?? data.run_end);
}

// --- mouse and keys ------------------------------------------------------------------------------------------------
const tip = byId('tip');
function showTip(event, text) {
  tip.style.display = text ? 'block' : 'none';
  if (!text) return;
  tip.textContent = text;
  tip.style.left = clamp(event.clientX + 14, 0, innerWidth - tip.offsetWidth - 8) + 'px';
  tip.style.top = clamp(event.clientY + 14, 0, innerHeight - tip.offsetHeight - 8) + 'px';
}
// A drag moves the view; with shift it chooses the part to zoom to. The wheel zooms with ctrl, and scrolls the page without.
function listen(drawing, hover, click) {
  const canvas = drawing.canvas, view = drawing.view;
  let from = null;
  canvas.addEventListener('wheel', (event) => {
    if (event.ctrlKey || event.metaKey) { event.preventDefault(); view.zoom(event.deltaY > 0 ? 1.25 : 0.8, clamp(drawing.at(event.offsetX), view.begin, view.end)); }
    else if (event.deltaX !== 0 && Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); view.move(event.deltaX / drawing.width); }
  }, {passive: false});
  canvas.addEventListener('pointerdown', (event) => { from = {x: event.offsetX, y: event.offsetY, begin: view.begin, end: view.end, zooms: event.shiftKey}; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener('pointermove', (event) => {
    if (!from) return showTip(event, hover(event.offsetX, event.offsetY));
    if (from.zooms) {
      drawing.now();
      drawing.context.fillStyle = colors.focus + '55';
      return drawing.context.fillRect(Math.min(from.x, event.offsetX), 0, Math.abs(event.offsetX - from.x), drawing.height);
    }
    const by = (from.x - event.offsetX) / (drawing.width - LEFT) * (from.end - from.begin);
    view.show(from.begin + by, from.end + by);
  });
  canvas.addEventListener('pointerup', (event) => {
    const began = from;
    from = null;
    if (!began) return;
    if (Math.abs(event.offsetX - began.x) < 4) return click(event.offsetX, event.offsetY);
    if (began.zooms) view.show(...[drawing.at(began.x), drawing.at(event.offsetX)].sort((a, b) => a - b));
  });
  canvas.addEventListener('pointercancel', () => { from = null; });
  canvas.addEventListener('pointerleave', (event) => showTip(event, ''));
}
const moves = {ArrowLeft: (view) => view.move(-0.2), ArrowRight: (view) => view.move(0.2), '+': (view) => view.zoom(0.5), '=': (view) => view.zoom(0.5),
  '-': (view) => view.zoom(2), Home: (view) => view.all()};
const axisMoves = {...moves, '[': () => goToStep(-1), ']': () => goToStep(1)};
const laneMoves = (rank) => ({...axisMoves, ',': () => pickNext(-1, rank), '.': () => pickNext(1, rank), '<': () => pickLane(-1, rank), '>': () => pickLane(1, rank)});
const stepMoves = {...moves, ArrowLeft: () => chooseBar(chosenBar - 1, false), ArrowRight: () => chooseBar(chosenBar + 1, false), Enter: () => chooseBar(chosenBar, true)};
function keys(canvas, view, known) {
  canvas.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !known[event.key]) return;
    event.preventDefault();
    known[event.key](view);
  });
}
for (const [id, act] of Object.entries({closer: () => time.zoom(0.5), wider: () => time.zoom(2), earlier: () => time.move(-0.5), later: () => time.move(0.5),
    before: () => goToStep(-1), after: () => goToStep(1), whole: () => time.all()})) {
  byId(id)?.addEventListener('click', act);
}

// --- the page ------------------------------------------------------------------------------------------------------
const drawings = [];
function start() {
  readColors();
  drawings.push(new Drawing(byId('axis'), 28, time, paintAxis));
  for (const rank of data.ranks) {
    let top = 4;
    for (const lane of rank.lanes) {
      lane.top = top;
      lane.height = lane.rows * ROW;
      lane.longest = lane.length.reduce((most, one) => Math.max(most, one), 0);
      top += lane.height;
    }
    const canvas = byId('rank' + rank.rank);
    if (!canvas) continue;  // the rank has no span in this time
    const drawing = new Drawing(canvas, top + 4, time, paintRank(rank));
    drawings.push(drawing);
    canvas.closest('details').addEventListener('toggle', () => drawing.later());
    listen(drawing, (x, y) => { const found = spanAt(drawing, rank, x, y); return found ? spanText(rank, found.lane, found.index) : ''; },
      (x, y) => { const found = spanAt(drawing, rank, x, y); pick(rank, found?.lane ?? null, found?.index ?? -1); });
    keys(canvas, time, laneMoves(rank));
  }
  listen(drawings[0], () => '', () => {});
  keys(byId('axis'), time, axisMoves);
  for (const times of data.steps ? data.steps.ranks : []) {
    const canvas = byId('steps' + times.rank), drawing = new Drawing(canvas, STEP_HEIGHT, steps, paintSteps(times));
    drawings.push(drawing);
    const bar = (x) => clamp(Math.floor(drawing.at(x)), 0, bars - 1);
    listen(drawing, (x) => x < LEFT ? '' : stepText(times, bar(x)), (x) => x < LEFT || chooseBar(bar(x), true));
    keys(canvas, steps, stepMoves);
  }
  time.changed.push(sayTime);
  const redraw = () => { readColors(); for (const one of drawings) one.now(); };
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
  redraw();
  sayTime();
}
start();
