# The targets are the interface; `make help` lists them.
GO       ?= go
VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT   ?= $(shell git rev-parse HEAD 2>/dev/null)
TAGS     ?=
# The server of etcd in jbofd, which adds 8 MB to its 20 MB: make build ETCD= leaves it out.
ETCD     ?= etcd
# A number of runs, not a time: Go reports a fuzzer that its time interrupts as failed now and then.
FUZZTIME ?= 100000x
FUZZ     ?= .
CONFIG   ?=
COMMANDS := jbofd jbofctl jbofbench

# RDMA and SPDK need C: make build TAGS=rdma, with libibverbs-dev and librdmacm-dev; TAGS=spdk, with an SPDK that
# pkg-config finds (docs/spdk.md).
export CGO_ENABLED ?= $(if $(filter rdma spdk,$(TAGS)),1,0)
ifneq ($(filter spdk,$(TAGS)),)
build test-spdk-target: spdk-pc
endif
build test-spdk-target: export PKG_CONFIG_PATH := $(CURDIR)/bin/spdk:$(PKG_CONFIG_PATH)
# Of a static library only those objects are linked that something refers to. Transports of SPDK and drivers of DPDK are
# referred to by nothing, and register themselves in constructors.
export CGO_LDFLAGS_ALLOW := -Wl,--whole-archive,.*

.DEFAULT_GOAL := build
.PHONY: help build test invariants race soak spdk-pc test-spdk test-spdk-target test-vm lint fuzz sim bench run demo \
	demo-cluster clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

build: ## static binaries in bin/ (TAGS=rdma: dynamic ones, with NVMe/RDMA)
	@mkdir -p bin
	$(GO) build -trimpath -tags '$(TAGS) $(ETCD)' \
	  -ldflags '-s -w -X main.version=$(VERSION) -X main.revision=$(COMMIT)' -o bin/ $(addprefix ./cmd/,$(COMMANDS))

# How many tests of a package that are marked as parallel run at once. Most of them wait for a timer or a daemon.
PARALLEL ?= 6

# The packages of algorithms and machines, whose rules exclude goroutines, locks and unsafe (internal/lint, which
# compares its list with this one). The race detector finds nothing in their tests; how others use them is raced there.
PURE := $(addprefix ./internal/,nvme drr tokenbucket congestion credit flowctl pipeline pipeline/gimbal \
	pipeline/jbof pipeline/baseline pipeline/policies ssd/model/flash ssd/parts sim nvmeof nvmeof/executor nvmeof/qpair \
	nvmeof/tcp nvmeof/tcp/pdu nvmeof/rdma nvmeof/rdma/cm nvmeof/rdma/wr list slab tenant units uuid kvstore \
	kvstore/check \
	kvstore/format kvstore/lookup kvstore/recovery kvstore/space kvstore/swap cluster cluster/view crrs crrs/linear \
	replica) \
	$(addprefix ./client/internal/,host hosttcp hostrdma kvop)

# Tests of several packages run this server of etcd. It is built once, and not while other tests run.
test race: export TEST_ETCD = $(CURDIR)/bin/jbofd-test-etcd
test-etcd = CGO_ENABLED=0 $(GO) build -tags etcd -ldflags '-s -w' -o '$(TEST_ETCD)' ./cmd/jbofd

test: ## every test that needs no VM and no root
	$(test-etcd)
	@# What waits most comes first, beside two packages that compute, and not alone at the end.
	$(GO) test -p 3 -parallel $(PARALLEL) ./test/e2e ./internal/daemon ./test/cluster ./...

race: ## the tests of all packages that have goroutines, under the race detector (needs a C compiler)
	$(test-etcd)
	CGO_ENABLED=1 $(GO) test -race -tags invariants -parallel $(PARALLEL) \
	  $$($(GO) list -f '.{{slice .ImportPath (len .Module.Path)}}' ./... | grep -vxF -e ./internal/lint $(PURE:%=-e %))

invariants: ## the tests of algorithms and machines, and some of the lab, with all invariants checked, no race detector
	$(GO) test -tags invariants $(PURE) ./internal/partition
	$(GO) test -tags invariants ./internal/lab/node -args -lab.seeds 600

SOAK ?= .
soak: ## the long runs of the random tests, with new seeds: three hours or more (SOAK=regexp of the tests)
	$(GO) test -count=1 -timeout 6h -v -run "$(SOAK)" ./internal/kvstore -args -long
	$(GO) test -count=1 -timeout 6h -v -run "$(SOAK)" ./internal/nvmeof/rdma/serve -args -chaos-seeds 100 -chaos-faults 100
	$(GO) test -count=1 -timeout 6h -v -run "$(SOAK)" ./internal/lab/node -args -lab.seeds 50000
	$(GO) test -count=1 -timeout 6h -v -run "$(SOAK)" ./internal/crrs -args -runs 60000
	$(GO) test -count=1 -timeout 6h -v -run "$(SOAK)" ./internal/replica -args -runs 5000
	$(GO) test -count=1 -timeout 6h -v -run "$(SOAK)" ./internal/cluster -args -runs 20000
	$(GO) test -count=1 -timeout 6h -v -run "$(SOAK)" ./internal/cluster/view -args -runs 30000
	$(GO) test -count=1 -timeout 6h -v -run "$(SOAK)" ./test/cluster -args -long 10000000
	test/fuzz.sh 1000000x '$(SOAK)'

# What the package links is in the module jbofd-spdk of pkg-config, made of those of SPDK here, or of a stand-in below.
spdk-pc:
	@pkg-config --print-errors --exists spdk_nvme spdk_env_dpdk spdk_syslibs
	@mkdir -p bin/spdk
	@all=$$(pkg-config --libs-only-l spdk_nvme spdk_env_dpdk | sed 's/ *$$//; s/  */,/g'); \
	printf 'Name: jbofd-spdk\nDescription: SPDK\nVersion: 0\nCflags: %s\nLibs: %s %s %s\n' \
	  "$$(pkg-config --cflags spdk_nvme spdk_env_dpdk)" "$$(pkg-config --libs-only-L spdk_nvme spdk_env_dpdk)" \
	  "-Wl,--whole-archive,$$all,--no-whole-archive" "$$(pkg-config --libs --static spdk_syslibs)" \
	  > bin/spdk/jbofd-spdk.pc

test-spdk-target: spdk-pc ## the same by a real SPDK on a target (TARGET='tcp ADDRESS PORT SUBNQN'), whose data are lost
	CGO_ENABLED=1 $(GO) test -count=1 -v -tags spdk,spdktarget ./internal/ssd/spdk -run Target -args -target '$(TARGET)'

STANDIN := bin/spdk-standin
test-spdk: ## the binding to SPDK, compiled and run against a stand-in (needs gcc and pkg-config)
	@mkdir -p $(STANDIN)
	for f in env standin; do $(or $(CC),gcc) -c -O2 -fPIC -Wall -Wextra -Iinternal/ssd/spdk/standin/include \
	  internal/ssd/spdk/standin/$$f.c -o $(STANDIN)/$$f.o || exit 1; done
	ar rcs $(STANDIN)/libspdk_standin.a $(STANDIN)/env.o $(STANDIN)/standin.o
	@printf 'Name: jbofd-spdk-standin\nDescription: stand-in\nVersion: 0\nCflags: %s\nLibs: %s\n' \
	  '-I$(CURDIR)/internal/ssd/spdk/standin/include' '-L$(CURDIR)/$(STANDIN) -lspdk_standin' \
	  > $(STANDIN)/jbofd-spdk-standin.pc
	PKG_CONFIG_PATH=$(CURDIR)/$(STANDIN) CGO_ENABLED=1 $(GO) vet -tags spdk,spdkstandin ./internal/ssd/spdk
	PKG_CONFIG_PATH=$(CURDIR)/$(STANDIN) CGO_ENABLED=1 $(GO) test -tags spdk,spdkstandin $(ARGS) ./internal/ssd/spdk

test-vm: build ## Debian kernels in QEMU, as the host and as a JBOF of arm64
	$(GO) test -tags vm -count=1 -timeout 30m -v ./test/vm

lint: ## gofmt, vet and the rules of the code
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); \
	if [ -n "$$unformatted" ]; then echo "gofmt would change:"; echo "$$unformatted"; exit 1; fi
	$(GO) vet ./...
	$(GO) vet -tags vm ./test/vm
	$(GO) vet -tags invariants ./internal/buildtags
	$(GO) test -count=1 ./internal/lint

fuzz: ## every native fuzzer, FUZZTIME (runs, or a time) each (FUZZ=regexp of the fuzzers)
	@test/fuzz.sh $(FUZZTIME) '$(FUZZ)'

sim: build ## the evaluation of the policies in virtual time, into sim-out/ (ARGS='--row size')
	bin/jbofbench sim gimbal --out sim-out $(ARGS)

bench: ## Go benchmarks of the hot paths
	$(GO) test -run '^$$' -bench . -benchmem -count $(or $(COUNT),1) ./internal/... ./client/...

run: build ## the daemon in the foreground (CONFIG=file; the embedded default without)
	bin/jbofd $(if $(CONFIG),--config $(CONFIG),--demo)

demo: build ## a daemon on loopback, two hosts that write and verify
	bin/jbofbench demo --jbofd bin/jbofd

demo-cluster: build ## three daemons and etcd on loopback; one is killed under load and comes back
	bin/jbofbench demo-cluster --jbofd bin/jbofd

clean: ## remove what build and test-vm made (not ./data)
	rm -rf bin test/vm/.cache
