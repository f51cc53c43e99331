//go:build !race

package mem

// streamBlocks copies src to dst with non-temporal stores. dst begins at a multiple of 64 bytes and is a multiple of 64
// bytes long, and src is as long as dst.
//
// hot: 0 allocs
//
//go:noescape
func streamBlocks(dst, src []byte)
