// The loop, drawn as it is: boxes laid out by the style sheet, wires drawn between them wherever they have come to lie.
import {h, known, s, short, whole} from './dom.js';

const ALIVE = new Set(['running', 'ready', 'starting']);
const MANY = 4;  // envs: more are one box

export function draw(place, all) {
  const envs = all.filter(node => node.role === 'env');
  const nodes = envs.length > MANY ? [together(envs), ...all.filter(node => node.role !== 'env')] : all;
  const of = role => nodes.filter(node => node.role === role);
  const boxes = new Map(nodes.map(node => [node.id, box(node)]));
  const get = list => list.map(node => boxes.get(node.id));
  const others = get([...of('scorer'), ...of('evaluator')]);
  const wires = s('svg', {class: 'wires', 'aria-hidden': true});
  place.replaceChildren(wires, h('div', {class: 'stack'}, get(of('env'))), ...get([...of('buffer'), ...of('batcher'), ...of('learner')]),
    h('div', {class: 'servers'}, get(of('inference'))), others.length ? h('div', {class: 'others'}, others) : '');
  const connect = () => wire(place, wires, nodes, boxes);
  connect();
  return connect;
}

const together = envs => ({...envs[0], id: 'envs', title: `${envs.length} environments`, parts: envs.flatMap(env => env.parts), pool: null,
  rate: envs.some(env => known(env.rate)) ? envs.reduce((sum, env) => sum + (env.rate ?? 0), 0) : null,
  facts: envs.map(env => ({label: env.title, value: env.rate, unit: '/s'}))});

export function box(node) {
  const alive = node.parts.some(part => ALIVE.has(part.state));
  const notes = node.parts.filter(part => part.note).map(part => h('div', {class: 'note'}, `${part.name}: ${part.note}`));
  const facts = node.facts.filter(fact => known(fact.value));
  return h('article', {class: `node n-${node.role}${alive ? '' : ' dead'}`, 'data-id': node.id},
    h('header', {class: node.parts.length > 8 && 'crowd'}, h('b', {title: node.title}, node.title),
      h('span', {class: 'dots'}, node.parts.map(part => h('i', {class: `dot ${part.state}`, title: described(part)}))),
      node.parts.length > 1 && h('span', {class: 'dim'}, `×${node.parts.length}`),
      known(node.version) && h('span', {class: 'badge', title: 'policy version'}, served(node))),
    h('div', {class: 'rate'}, node.rate_unit && [short(node.rate), ' ', h('small', {}, node.rate_unit)],
      known(node.lag) && h('span', {class: `lag${node.lag > 0 ? ' behind' : ''}`, title: 'records not taken yet'}, `lag ${whole(node.lag)}`)),
    facts.length > 0 && h('dl', {}, facts.map(fact => [h('dt', {}, fact.label), h('dd', {}, `${short(fact.value)}${fact.unit ? ` ${fact.unit}` : ''}`)])),
    notes);
}

const described = part => `${part.name}: ${part.state}${known(part.version) ? `, version ${part.version}` : ''}${part.restarts ? `, ${part.restarts} restarts` : ''}`;

function served(node) {
  const found = node.parts.map(part => part.version).filter(known);
  const [low, high] = [Math.min(...found), Math.max(...found)];
  return found.length && low < high ? `v${low}–${high}` : `v${node.version}`;
}

// ---- wires ----
function wire(place, svg, nodes, boxes) {
  const origin = place.getBoundingClientRect(), narrow = getComputedStyle(place).gridTemplateColumns.split(' ').length < 2;
  const at = node => { const b = boxes.get(node.id).getBoundingClientRect(); return {l: b.left - origin.left, r: b.right - origin.left, t: b.top - origin.top, b: b.bottom - origin.top, x: (b.left + b.right) / 2 - origin.left, y: (b.top + b.bottom) / 2 - origin.top}; };
  const one = role => nodes.find(node => node.role === role), all = role => nodes.filter(node => node.role === role);
  const moving = node => Boolean(node && node.rate > 0 && node.parts.some(part => ALIVE.has(part.state)));
  const [buffer, batcher, learner] = ['buffer', 'batcher', 'learner'].map(one), envs = all('env'), servers = all('inference');
  const found = [];
  const add = (path, tip, turn, name, on, label) => {
    found.push(s('path', {class: `wire ${name}${on ? ' moving' : ''}`, d: path}), s('path', {class: `arrow${on ? ' moving' : ''}`, d: 'M0 0L-7 -3.6L-7 3.6Z', transform: `translate(${tip[0]} ${tip[1]}) rotate(${turn})`}));
    if (label) found.push(s('text', {class: 'wire-label', x: label[1], y: label[2]}, label[0]));
  };
  const across = (from, to, label, on, y0 = from.y, y1 = to.y) => {
    const middle = (from.r + to.l) / 2;
    add(`M${from.r} ${y0}C${middle} ${y0} ${middle} ${y1} ${to.l - 3} ${y1}`, [to.l, y1], 0, '', on, label && [label, middle, Math.min(y0, y1) - 6 + Math.abs(y0 - y1) / 2]);
  };
  const down = (from, to, label, on) => add(`M${from.x} ${from.b}L${to.x} ${to.t - 3}`, [to.x, to.t], 90, '', on, [label, from.x + 4, (from.b + to.t) / 2 + 4]);
  if (narrow) {
    const chain = [envs.at(-1), buffer, batcher, learner, servers[0]].filter(Boolean).map(at);
    ['rollouts', 'groups', 'batches', 'versions'].forEach((label, i) => chain[i + 1] && down(chain[i], chain[i + 1], label, moving([envs.at(-1), buffer, batcher, learner][i])));
    const last = at(servers.at(-1) ?? learner);
    envs.forEach(env => { const to = at(env); add(`M${last.l} ${last.y}H6Q2 ${last.y} 2 ${last.y - 6}V${to.y + 6}Q2 ${to.y} 6 ${to.y}H${to.l - 3}`, [to.l, to.y], 0, '', moving(env), null); });
    const from = at(batcher), to = at(envs[0]), edge = origin.width - 4;
    add(`M${from.r} ${from.y}H${edge - 4}Q${edge} ${from.y} ${edge} ${from.y - 6}V${to.y + 6}Q${edge} ${to.y} ${edge - 4} ${to.y}H${to.r + 3}`, [to.r, to.y], 180, 'demand', false, null);
  } else {
    envs.forEach((env, i) => across(at(env), at(buffer), i === 0 ? 'rollouts' : '', moving(env), at(env).y - 8, at(buffer).y + (i - (envs.length - 1) / 2) * Math.min(10, 40 / envs.length)));
    across(at(buffer), at(batcher), 'groups', moving(buffer));
    across(at(batcher), at(learner), 'batches', moving(learner));
    const low = at(learner), top = at(batcher);
    servers.forEach((server, i) => {
      const to = at(server), x = all('scorer').length + all('evaluator').length ? low.l + 12 + i * 9 : low.x - i * 10;  // past the boxes below
      add(`M${x} ${low.b}V${to.y - 8}Q${x} ${to.y} ${x - 8} ${to.y}H${to.r + 3}`, [to.r, to.y], 180, '', moving(learner), i === 0 ? ['policy versions', (x + to.r) / 2, to.y - 6] : null);
      envs.filter(env => env.pool === null || env.pool === server.pool).forEach((env, j) => {
        const end = at(env), y = Math.min(end.b - 8, end.y + 10), middle = (to.l + end.r) / 2;
        add(`M${to.l} ${to.y}C${middle} ${to.y} ${middle} ${y} ${end.r + 3} ${y}`, [end.r, y], 180, '', moving(env), i + j === 0 ? ['tokens', (to.l + end.r) / 2, to.y + 15] : null);
      });
    });
    const head = at(envs[0]), line = 8;
    add(`M${top.x} ${top.t}V${line + 8}Q${top.x} ${line} ${top.x - 8} ${line}H${head.x + 8}Q${head.x} ${line} ${head.x} ${line + 8}V${head.t - 3}`, [head.x, head.t], 90, 'demand', false, ['demand', (top.x + head.x) / 2, line + 4]);
    for (const scorer of all('scorer')) { const to = at(scorer); add(`M${to.x} ${to.t}V${low.b + 3}`, [to.x, low.b], -90, '', false, ['scores', to.x + 24, (to.t + low.b) / 2 + 4]); }
  }
  svg.replaceChildren(...found);
}
