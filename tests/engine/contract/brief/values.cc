// SPDX-License-Identifier: Apache-2.0
// Mistakes in values that travel. See shared.cc.

// ---- Values without a codec.

#ifdef STRUCT_AS_ARGUMENT  // says: WEFT_FIELDS
double rate(Settings settings) { return settings.rate; }
double call(const Agent& agent) { return agent.sync<&rate>("worker1", Settings()); }
#endif
#ifdef STRUCT_IN_A_VECTOR  // says: WEFT_FIELDS
std::size_t count(std::vector<Settings> settings) { return settings.size(); }
std::size_t call(const Agent& agent) {
  return agent.async<&count>("worker1", std::vector<Settings>(2)).get();
}
#endif
#ifdef STRUCT_IN_A_MAP  // says: WEFT_FIELDS
std::size_t count(const std::map<std::string, Settings>& settings) { return settings.size(); }
std::size_t call(const Agent& agent) {
  return agent.sync<&count>("worker1", std::map<std::string, Settings>());
}
#endif
#ifdef STRUCT_AS_RESULT  // says: WEFT_FIELDS
Settings settings() { return {}; }
double call(const Agent& agent) { return agent.sync<&settings>("worker1").rate; }
#endif
#ifdef STRUCT_AS_VALUE_FETCHED  // says: WEFT_FIELDS
int call(const Agent& agent) { return agent.remote<Counter>("worker1", 1).to_here().count; }
#endif
#ifdef STRUCT_IN_A_STRUCT  // says: WEFT_FIELDS
struct Outer {
  Settings settings;
  int number = 0;
  WEFT_FIELDS(settings, number)
};
int number(Outer outer) { return outer.number; }
int call(const Agent& agent) { return agent.sync<&number>("worker1", Outer()); }
#endif
#ifdef POINTER_IN_A_STRUCT  // says: cannot hold a view or a pointer
struct Outer {
  int* place = nullptr;
  int number = 0;
  WEFT_FIELDS(place, number)
};
int number(Outer outer) { return outer.number; }
int call(const Agent& agent) { return agent.sync<&number>("worker1", Outer()); }
#endif
#ifdef NO_DEFAULT_CONSTRUCTOR  // says: give this struct a default constructor
struct Outer {
  explicit Outer(int first) : number(first) {}
  int number;
  WEFT_FIELDS(number)
};
int number(Outer outer) { return outer.number; }
int call(const Agent& agent) { return agent.sync<&number>("worker1", Outer(1)); }
#endif
#ifdef PRIVATE_FIELDS  // says: where it is public
class Closed {
  int number = 0;
  WEFT_FIELDS(number)
};
int number(Closed) { return 1; }
int call(const Agent& agent) { return agent.sync<&number>("worker1", Closed()); }
#endif
#ifdef FIELD_THAT_IS_NONE  // in 20 lines, says: 'numbre'
struct Outer {
  int number = 0;
  WEFT_FIELDS(numbre)
};
int number(Outer outer) { return outer.number; }
int call(const Agent& agent) { return agent.sync<&number>("worker1", Outer()); }
#endif
#ifdef FIELDS_OF_A_LOCAL_STRUCT  // in 20 lines, says: local class
auto bytes() {
  struct Local {
    int number = 0;
    WEFT_FIELDS(number)
  };
  return weft::encode(Local());
}
#endif
#ifdef LONG_DOUBLE  // says: a long double cannot be sent
long double half(long double number) { return number / 2; }
long double call(const Agent& agent) { return agent.sync<&half>("worker1", 1.0L); }
#endif
#ifdef MODULE_AS_ARGUMENT  // says: a torch::nn module
at::Tensor run(Net net, at::Tensor x) { return net(x); }
at::Tensor call(const Agent& agent, const Net& net, const at::Tensor& x) {
  return agent.sync<&run>("worker1", net, x);
}
#endif
#ifdef SHARED_MODULE_AS_ARGUMENT  // says: a torch::nn module
void train(std::shared_ptr<torch::nn::Module> net) { net->train(); }
void call(const Agent& agent, const Net& net) { agent.async<&train>("worker1", net.ptr()).get(); }
#endif
#ifdef MODULE_IMPL_AS_ARGUMENT  // says: a torch::nn module
at::Tensor run(NetImpl net, at::Tensor x) { return net.forward(x); }
at::Tensor call(const Agent& agent, const NetImpl& net, const at::Tensor& x) {
  return agent.sync<&run>("worker1", net, x);
}
#endif
#ifdef MODULES_AS_ARGUMENT  // says: a torch::nn module
std::size_t count(std::vector<torch::nn::Linear> layers) { return layers.size(); }
std::size_t call(const Agent& agent) {
  return agent.sync<&count>("worker1", std::vector<torch::nn::Linear>());
}
#endif
#ifdef MODULE_AS_RESULT  // says: a torch::nn module
Net make() { return {}; }
at::Tensor call(const Agent& agent, const at::Tensor& x) { return agent.sync<&make>("worker1")(x); }
#endif
#ifdef MODULE_FETCHED  // says: a torch::nn module
at::Tensor call(const Agent& agent, const at::Tensor& x) {
  return agent.remote<Net>("worker1").to_here()(x);
}
#endif
#ifdef OPTIMIZER_AS_ARGUMENT  // says: WEFT_FIELDS
void step(std::shared_ptr<torch::optim::SGD> optimizer) { optimizer->step(); }
void call(const Agent& agent, const std::shared_ptr<torch::optim::SGD>& sgd) {
  agent.sync<&step>("worker1", sgd);
}
#endif
#ifdef STRUCT_ENCODED  // says: WEFT_FIELDS
auto bytes() { return weft::encode(Settings()); }
#endif
#ifdef MODULE_ENCODED  // says: a torch::nn module
auto bytes(const Net& net) { return weft::encode(net); }
#endif
#ifdef VIEW_DECODED  // says: cannot hold a view or a pointer
auto text(const std::vector<std::byte>& bytes) { return weft::decode<std::string_view>(bytes); }
#endif
#ifdef POINTER_ENCODED  // says: cannot hold a view or a pointer
auto bytes(const Counter& counter) { return weft::encode(&counter); }
#endif
#ifdef STRUCT_OF_ALL_RANKS  // says: WEFT_FIELDS
double call(const ProcessGroup& group) {
  return weft::all_gather_object(Settings(), group)[0].rate;
}
#endif
#ifdef STRUCT_RECEIVED  // says: WEFT_FIELDS
double call(const ProcessGroup& group) { return weft::recv_object<Settings>(0, group).rate; }
#endif
