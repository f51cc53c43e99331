// Package certs makes certificates for tests.
package certs

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// CA is a certificate authority.
type CA struct {
	// File has its certificate in PEM.
	File string
	t    testing.TB
	dir  string
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	next int64
}

// New returns a certificate authority.
func New(t testing.TB) *CA {
	t.Helper()
	ca := &CA{t: t, dir: t.TempDir()}
	tmpl := &x509.Certificate{Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign}
	ca.key = ca.newKey()
	der := ca.sign(tmpl, tmpl, &ca.key.PublicKey, ca.key)
	var err error
	if ca.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	ca.File = ca.write("ca.pem", "CERTIFICATE", der)
	return ca
}

func (ca *CA) newKey() *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		ca.t.Fatal(err)
	}
	return key
}

func (ca *CA) sign(tmpl, parent *x509.Certificate, pub *ecdsa.PublicKey, key *ecdsa.PrivateKey) []byte {
	ca.next++
	tmpl.SerialNumber = big.NewInt(ca.next)
	tmpl.NotBefore, tmpl.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, pub, key)
	if err != nil {
		ca.t.Fatal(err)
	}
	return der
}

func (ca *CA) write(name, kind string, der []byte) string {
	path := filepath.Join(ca.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		ca.t.Fatal(err)
	}
	return path
}

// Issue writes a certificate for servers and clients, and its key. Names that are IP addresses are such.
func (ca *CA) Issue(names ...string) (certFile, keyFile string) {
	ca.t.Helper()
	tmpl := &x509.Certificate{Subject: pkix.Name{CommonName: names[0]},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	for _, n := range names {
		if ip := net.ParseIP(n); ip != nil {
			tmpl.IPAddresses = append(tmpl.IPAddresses, ip)
		} else {
			tmpl.DNSNames = append(tmpl.DNSNames, n)
		}
	}
	key := ca.newKey()
	der := ca.sign(tmpl, ca.cert, &key.PublicKey, ca.key)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		ca.t.Fatal(err)
	}
	base := names[0] + "-" + tmpl.SerialNumber.String()
	return ca.write(base+".pem", "CERTIFICATE", der), ca.write(base+".key", "PRIVATE KEY", pkcs8)
}

// Config returns the configuration of a server or client that has a certificate and trusts this authority only.
func (ca *CA) Config(names ...string) *tls.Config {
	ca.t.Helper()
	pair, err := tls.LoadX509KeyPair(ca.Issue(names...))
	if err != nil {
		ca.t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	return &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: pool, ClientCAs: pool,
		MinVersion: tls.VersionTLS13}
}
