// SPDX-License-Identifier: Apache-2.0
// Functions and types that two programs of one job share: one serves them and makes no calls, the
// other calls them. See two_programs_test.cc.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/rpc.h>

namespace apart {

int plus(int a, int b);
std::string greet(const std::string& name);
void nothing();
at::Tensor doubled(at::Tensor tensor);
weft::Future<int> later(int value);
int throws(std::string text);
int sum_of(weft::RRef<int> a, std::vector<weft::RRef<int>> more);
std::pair<weft::RRef<std::string>, int> owned(std::string text);

// Can be sent, and refers to another one.
struct Node {
  int value = 0;
  weft::RRef<Node> next;
  WEFT_FIELDS(value, next)
};
Node chain(int length);

// Cannot be sent.
class Counter {
 public:
  explicit Counter(int start, std::string name = "");
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  int add(int change);
  int value() const&;
  weft::RRef<std::string> name() const;

 private:
  int value_;
  std::string name_;
};
int value_of(const Counter& counter);
// Cannot be sent either.
struct Heap {
  std::vector<void*> pointers;
};
Heap heap(int pointers);
int pointers(const Heap& heap);

// It has parameters, as a module.
struct Weights {
  explicit Weights(int rows);
  std::vector<at::Tensor> parameters() const { return {rows}; }
  at::Tensor rows;
};

// Nobody exposes it.
int hidden(int value);

}  // namespace apart
