// SPDX-License-Identifier: Apache-2.0
// Mistakes with references, futures and calls by name. See shared.cc.

// ---- References.

#ifdef TOO_FEW_ARGUMENTS_OF_A_METHOD  // says: the method takes another number of arguments
int call(const RRef<Counter>& counter) { return counter.sync<&Counter::add>(); }
#endif
#ifdef TOO_MANY_ARGUMENTS_OF_A_METHOD  // says: the method takes another number of arguments
int call(const RRef<Counter>& counter) { return counter.async<&Counter::add>(1, 2).get(); }
#endif
#ifdef WRONG_TYPE_OF_A_METHOD  // says: an argument cannot be converted to the type that the
                               // function takes
int call(const RRef<Counter>& counter) { return counter.remote<&Counter::add>("one").to_here(); }
#endif
#ifdef WRONG_TYPE_OF_A_METHOD_WITHIN_A_TIME  // says: an argument cannot be converted to the type
                                             // that the function takes
int call(const RRef<Counter>& counter) {
  return counter.timeout(std::chrono::seconds(1)).sync<&Counter::add>("one");
}
#endif
#ifdef DESTINATION_OF_A_METHOD  // says: the method takes another number of arguments
int call(const RRef<Counter>& counter) { return counter.sync<&Counter::add>("worker1", 1); }
#endif
#ifdef NON_CONST_REFERENCE_OF_A_METHOD  // says: cannot take a non-const lvalue reference
void call(const RRef<Counter>& counter, std::vector<int> numbers) {
  counter.sync<&Counter::fill>(numbers);
}
#endif
#ifdef METHOD_RETURNS_POINTER  // says: cannot return a view or a pointer
int call(const RRef<Counter>& counter) { return *counter.sync<&Counter::place>(); }
#endif
#ifdef METHOD_OF_ANOTHER_CLASS  // says: a member function of another class
double call(const RRef<Counter>& counter) { return counter.sync<&Timer::seconds>(); }
#endif
#ifdef METHOD_THAT_IS_NONE  // says: is not a member of | no member named 'none'
void call(const RRef<Counter>& counter) { counter.sync<&Counter::none>(); }
#endif
#ifdef MEMBER_VARIABLE  // says: a lambda or function object has no name
int call(const RRef<Counter>& counter) { return counter.sync<&Counter::count>(); }
#endif
#ifdef OVERLOADED_METHOD  // says: static_cast<R (M::*)(P...)>(&M::f)
int call(const RRef<Counter>& counter) { return counter.sync<&Counter::get>(1); }
#endif
#ifdef LAMBDA_ON_A_VALUE  // says: a lambda or function object has no name
int call(const RRef<Counter>& counter) {
  return counter.async<[](Counter& one) { return one.get(); }>().get();
}
#endif
#ifdef FUNCTION_OF_A_COPY  // says: takes the value first, by reference
int count(Counter counter) { return counter.get(); }
int call(const RRef<Counter>& counter) { return counter.sync<&count>(); }
#endif
#ifdef METHOD_OF_PYTORCHS_PROXY  // says: no member named 'rpc_sync'
int call(const RRef<Counter>& counter) { return counter.rpc_sync().add(1); }
#endif
#ifdef WRONG_ARGUMENTS_OF_A_CONSTRUCTOR  // says: no constructor that takes these arguments
RRef<Counter> call(const Agent& agent) {
  return agent.remote<Counter>("worker1", std::vector<int>());
}
#endif
#ifdef TOO_MANY_ARGUMENTS_OF_A_CONSTRUCTOR  // says: no constructor that takes these arguments
int call(const Agent& agent) {
  return agent.remote<Counter>("worker1", 1, 2).sync<&Counter::add>(1);
}
#endif
#ifdef ABSTRACT_CLASS  // says: no constructor that takes these arguments
struct Shape {
  virtual ~Shape() = default;
  virtual double area() const = 0;
};
double call(const Agent& agent) { return agent.remote<Shape>("worker1").sync<&Shape::area>(); }
#endif
#ifdef POINTER_TO_A_CONSTRUCTOR  // says: cannot take a view or a pointer
struct Buffer {
  Buffer(const float* first, int) : number(*first) {}
  float number;
};
void call(const Agent& agent, const float* numbers) { agent.remote<Buffer>("worker1", numbers, 2); }
#endif
#ifdef STRUCT_TO_A_CONSTRUCTOR  // says: WEFT_FIELDS
struct Trainer {
  explicit Trainer(Settings given) : settings(given) {}
  Settings settings;
};
void call(const Agent& agent) { agent.remote<Trainer>("worker1", Settings()); }
#endif
#ifdef FETCHED_WITHOUT_A_COPY  // says: cannot be copied: call a method on it where it is
int call(const RRef<std::unique_ptr<int>>& number) { return *number.to_here(); }
#endif
#ifdef COPIED_WITHOUT_A_COPY  // says: cannot be copied: call a method on it where it is
RRef<std::unique_ptr<double>> call(const RRef<std::unique_ptr<double>>& number) {
  return number.copy_to("worker1");
}
#endif
#ifdef WRONG_VALUE_OF_A_REFERENCE  // says: the value of an RRef<T> is a T
RRef<std::string> call(const Agent& agent) { return RRef<std::string>(agent, 7); }
#endif
#ifdef REFERENCE_TO_ANOTHER_TYPE  // says: could not convert | no viable conversion
RRef<int> call(const Agent& agent) { return agent.remote<&text_of>("worker1", 7); }
#endif

// ---- Futures.

#ifdef CONTINUATION_OF_ANOTHER_TYPE  // says: a continuation takes the Future, or its value
int call(const Agent& agent) {
  return agent.async<&plus>("worker1", 1, 2)
      .then([](const std::string& text) { return text.size(); })
      .get();
}
#endif
#ifdef CONTINUATION_OF_A_VALUE_THAT_IS_NONE  // says: a continuation of a Future<void> takes the
                                             // Future, or nothing
auto call(const Future<void>& done) {
  return done.then([](int value) { return value; });
}
#endif
#ifdef CONTINUATION_WITHOUT_A_PARAMETER  // says: a continuation takes the Future, or its value
int call(const Future<int>& later) {
  return later.then([] { return 1; }).get();
}
#endif
#ifdef CONTINUATION_THAT_IS_NO_FUNCTION  // says: a continuation takes the Future, or its value
auto call(const Future<int>& later) { return later.then(7); }
#endif
#ifdef CONTINUATION_THAT_CHANGES_THE_VALUE  // says: a continuation takes the Future, or its value
void call(const Future<int>& later) {
  later.then([](int& value) { ++value; });
}
#endif
#ifdef LOOK_OF_ANOTHER_TYPE  // says: on_done
void call(const Future<int>& later) {
  later.on_done([](const std::string&) {});
}
#endif
#ifdef FUTURE_OF_ANOTHER_TYPE  // says: could not convert | no viable conversion
Future<int> call(const Agent& agent) { return agent.async<&text_of>("worker1", 7); }
#endif
#ifdef SHARED_FUTURE_OF_WHAT_CANNOT_BE_COPIED  // says: futures share their value, and this value
                                               // cannot be copied
std::unique_ptr<int> make() { return nullptr; }
auto call(const Agent& agent) { return agent.async<&make>("worker1").get(); }
#endif
#ifdef PROMISE_OF_ANOTHER_TYPE  // says: cast from
void call(const weft::Promise<int>& promise) { promise.set("seven"); }
#endif
#ifdef READY_OF_ANOTHER_TYPE  // says: the value of a Future<T> is a T
Future<int> call() { return Future<int>::ready(std::string("seven")); }
#endif

// ---- Calls by name.

#ifdef MAP_TO_AN_OPERATOR  // says: an operator called by name takes
at::Tensor call(const Agent& agent) {
  return agent.sync_op("aten::add", "worker1", std::map<int, int>());
}
#endif
#ifdef STRUCT_TO_A_SCRIPT  // says: a script takes tensors, numbers, strings
at::Tensor call(const Agent& agent) {
  return agent.sync_script("math.scale", "worker1", Settings());
}
#endif
#ifdef STRUCT_OF_A_SCRIPT  // says: a script's result is a tensor, a number
double call(const Agent& agent) {
  return agent.sync_script<Settings>("math.scale", "worker1").rate;
}
#endif
#ifdef EXPOSED_LAMBDA  // says: a lambda or function object has no name
void call() {
  weft::rpc::expose<[](int a) { return a; }>();
}
#endif
#ifdef EXPOSED_STRUCT  // says: WEFT_FIELDS
double rate(Settings settings) { return settings.rate; }
void call() { weft::rpc::expose<&rate>(); }
#endif
