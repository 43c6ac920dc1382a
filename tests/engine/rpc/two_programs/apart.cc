// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <weft/tests/engine/rpc/two_programs/apart.h>

namespace apart {

int plus(int a, int b) { return a + b; }
std::string greet(const std::string& name) { return "hello " + name; }
void nothing() {}
at::Tensor doubled(at::Tensor tensor) { return tensor * 2; }
weft::Future<int> later(int value) {
  weft::Promise<int> promise;
  promise.set(value);
  return promise.future();
}
int throws(std::string text) { throw std::runtime_error(text); }
int sum_of(weft::RRef<int> a, std::vector<weft::RRef<int>> more) {
  int sum = a.to_here();
  for (const auto& one : more) sum += one.to_here();
  return sum;
}
std::pair<weft::RRef<std::string>, int> owned(std::string text) {
  const int characters = static_cast<int>(text.size());
  return {weft::RRef<std::string>(std::move(text)), characters};
}

Node chain(int length) {
  Node node{length, {}};
  if (length > 1) node.next = weft::RRef<Node>(chain(length - 1));
  return node;
}

Counter::Counter(int start, std::string name) : value_(start), name_(std::move(name)) {}
int Counter::add(int change) { return value_ += change; }
int Counter::value() const& { return value_; }
weft::RRef<std::string> Counter::name() const { return weft::RRef<std::string>(name_); }
int value_of(const Counter& counter) { return counter.value(); }

Heap heap(int pointers) { return {std::vector<void*>(static_cast<std::size_t>(pointers))}; }
int pointers(const Heap& heap) { return static_cast<int>(heap.pointers.size()); }

int hidden(int value) { return value; }

Weights::Weights(int number_of_rows) : rows(at::ones({number_of_rows})) {}

}  // namespace apart
