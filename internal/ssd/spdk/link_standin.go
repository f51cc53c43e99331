//go:build spdk && cgo && spdkstandin

package spdk

// Go's cache of builds does not look at what pkg-config answers. So the stand-in, for tests, has a file and a name of
// its own: nothing that was compiled with it is used for a real SPDK.

// #cgo pkg-config: jbofd-spdk-standin
import "C"
