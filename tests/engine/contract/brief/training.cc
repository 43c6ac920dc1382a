// SPDX-License-Identifier: Apache-2.0
// Mistakes in training and in groups. See shared.cc.

// ---- Modules in parallel.

#ifdef IMPL_BY_VALUE  // says: std::make_shared
auto call(const ProcessGroup& group) { return DistributedDataParallel(NetImpl(), group); }
#endif
#ifdef IMPL_AS_VARIABLE  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const at::Tensor& x) {
  NetImpl net;
  DistributedDataParallel ddp(net, group);
  return ddp(x);
}
#endif
#ifdef IMPL_NAMED_BY_VALUE  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const at::Tensor& x) {
  NetImpl net;
  DistributedDataParallel<NetImpl> ddp(net, group);
  return ddp(x);
}
#endif
#ifdef IMPL_BY_POINTER  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const at::Tensor& x) {
  NetImpl net;
  DistributedDataParallel ddp(&net, group);
  return ddp(x);
}
#endif
#ifdef UNIQUE_MODULE  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const at::Tensor& x) {
  DistributedDataParallel ddp(std::make_unique<NetImpl>(), group);
  return ddp(x);
}
#endif
#ifdef HOLDER_AS_TYPE  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const Net& net, const at::Tensor& x) {
  DistributedDataParallel<Net> ddp(net, group);
  return ddp(x);
}
#endif
#ifdef NO_MODULE  // says: std::make_shared
void call(const ProcessGroup& group) {
  DistributedDataParallel ddp(std::make_shared<Counter>(), group);
}
#endif
#ifdef TENSOR_AS_MODULE  // says: std::make_shared
void call(const ProcessGroup& group, const at::Tensor& x) { DistributedDataParallel ddp(x, group); }
#endif
#ifdef PARAMETERS_AS_MODULE  // says: std::make_shared
void call(const ProcessGroup& group, const Net& net) {
  DistributedDataParallel ddp(net->parameters(), group);
}
#endif
#ifdef MODULE_WITHOUT_GROUP  // says: then the group
void call(const Net& net) { DistributedDataParallel ddp(net); }
#endif
#ifdef IMPL_TO_BE_SHARDED  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const at::Tensor& x) {
  NetImpl net;
  FullyShardedDataParallel sharded(net, group);
  return sharded(x);
}
#endif
#ifdef HOLDER_AS_TYPE_TO_BE_SHARDED  // says: std::make_shared
at::Tensor call(const ProcessGroup& group, const Net& net, const at::Tensor& x) {
  FullyShardedDataParallel<Net> sharded(net, group);
  return sharded(x);
}
#endif
#ifdef MODULE_TO_BE_SHARDED_WITHOUT_GROUP  // says: then the group
void call(const Net& net) { FullyShardedDataParallel sharded(net); }
#endif
#ifdef WRONG_INPUT  // says: the module's forward() does not take these arguments
at::Tensor call(const ProcessGroup& group, const Net& net) {
  DistributedDataParallel ddp(net, group);
  return ddp("text");
}
#endif
#ifdef NO_INPUT  // says: the module's forward() does not take these arguments
at::Tensor call(const ProcessGroup& group, const Net& net) {
  DistributedDataParallel ddp(net, group);
  return ddp.forward();
}
#endif
#ifdef NO_FORWARD  // says: the module's forward() does not take these arguments
at::Tensor call(const ProcessGroup& group, const std::shared_ptr<torch::nn::Module>& net,
                const at::Tensor& x) {
  DistributedDataParallel ddp(net, group);
  return ddp(x);
}
#endif
#ifdef CHECKPOINTED_WRAPPER  // says: and not a wrapper such as
at::Tensor call(DistributedDataParallel<NetImpl>& ddp, const at::Tensor& x) {
  return weft::checkpointed(ddp, x);
}
#endif
#ifdef CHECKPOINTED_FUNCTION  // says: checkpointed takes a torch::nn module first
at::Tensor call(const at::Tensor& x) {
  return weft::checkpointed([](const at::Tensor& y) { return y; }, x);
}
#endif
#ifdef CHECKPOINTED_WITH_OTHER_INPUT  // says: the module's forward() does not take these arguments
at::Tensor call(const Net& net) { return weft::checkpointed(net, "text"); }
#endif
#ifdef CHECKPOINTED_VIEW  // says: keeps its arguments until backward
struct Summing : torch::nn::Module {
  at::Tensor forward(at::TensorList parts) { return parts[0] + parts[1]; }
};
at::Tensor call(const std::shared_ptr<Summing>& module, const std::vector<at::Tensor>& parts) {
  return weft::checkpointed(module, at::TensorList(parts));
}
#endif
#ifdef CHECKPOINTED_NUMBER  // says: checkpointed takes modules whose forward() returns
struct Counting : torch::nn::Module {
  double forward(const at::Tensor& x) { return static_cast<double>(x.numel()); }
};
double call(const std::shared_ptr<Counting>& module, const at::Tensor& x) {
  return weft::checkpointed(module, x);
}
#endif
#ifdef PARAMETERS_OF_THE_REPLICA  // says: has no member named 'parameters' | no member named
                                  // 'parameters'
auto call(DistributedDataParallel<NetImpl>& ddp) { return ddp.parameters(); }
#endif
#ifdef PARAMETERS_OF_THE_REPLICA_BY_ARROW  // says: non-pointer type | is not a pointer
auto call(DistributedDataParallel<NetImpl>& ddp) { return ddp->parameters(); }
#endif
#ifdef COPY_OF_A_REPLICA  // says: use of deleted function | implicitly-deleted copy constructor
auto call(DistributedDataParallel<NetImpl>& ddp) { return ddp; }
#endif
#ifdef CHECKPOINT_OF_A_REPLICA  // says: (of a DistributedDataParallel: its module())
auto call(DistributedDataParallel<NetImpl>& ddp) { return weft::checkpoint::Part("model", ddp); }
#endif
#ifdef CHECKPOINT_OF_A_STRUCT  // says: a checkpoint's part is a torch::nn module
void call(const ProcessGroup& group, Settings& settings) {
  weft::checkpoint::save("run.pt", group, {{"settings", settings}});
}
#endif
#ifdef SHARDED_WITHOUT_OPTIONS  // says: ZeroRedundancyOptimizer
void call(const ProcessGroup& group, const Net& net) {
  weft::ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(net->parameters(), group);
  optimizer.step();
}
#endif
#ifdef SHARDED_WITH_OTHER_OPTIONS  // says: ZeroRedundancyOptimizer
void call(const ProcessGroup& group, const Net& net) {
  weft::ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(net->parameters(), group, Settings());
  optimizer.step();
}
#endif
#ifdef SHARDED_WITH_THE_OPTIONS_SECOND  // says: ZeroRedundancyOptimizer
void call(const ProcessGroup& group, const Net& net) {
  weft::ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(net->parameters(),
                                                             torch::optim::SGDOptions(0.1), group);
  optimizer.step();
}
#endif
#ifdef SHARDED_NO_OPTIMIZER  // says: ZeroRedundancyOptimizer takes a libtorch optimizer class
void call(const ProcessGroup& group, const Net& net) {
  weft::ZeroRedundancyOptimizer<Counter> optimizer(net->parameters(), group, 0.1);
}
#endif
#ifdef DISTRIBUTED_OPTIMIZER_OF_TENSORS  // says: DistributedOptimizer
void call(const Net& net) {
  weft::DistributedOptimizer<torch::optim::SGD> optimizer(net->parameters(),
                                                          torch::optim::SGDOptions(0.1));
}
#endif
#ifdef DISTRIBUTED_OPTIMIZER_WITH_OTHER_OPTIONS  // says: DistributedOptimizer
void call(const std::vector<RRef<at::Tensor>>& parameters) {
  weft::DistributedOptimizer<torch::optim::SGD> optimizer(parameters, Settings());
}
#endif

// ---- Groups.

#ifdef SUM_WITHOUT_A_GROUP  // says: too few arguments
at::Tensor call(const at::Tensor& x) { return weft::functional::all_reduce(x); }
#endif
#ifdef SUM_BY_NAME  // says: cannot convert 'const char*' to 'weft::ReduceOp' | parameter of type
                    // 'ReduceOp'
at::Tensor call(const ProcessGroup& group, const at::Tensor& x) {
  return weft::functional::all_reduce(x, group, "sum");
}
#endif
#ifdef WORKERS_OPTIONS_BY_POSITION  // says: could not convert '0' | too many arguments to function
                                    // call
void call() { weft::rpc::init("worker0", 0, 2); }
#endif
